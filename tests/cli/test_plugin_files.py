"""``--plugin FILE``: which files are taken, and what is said about the others; in this process, without a run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from calfat_plugin import PluginError, RecipeError, __version__, load_model
from calfat_plugin.interfaces import SetUpTask
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.recipe.plugin_files import plugin_files, with_plugins
from calfat_plugin.runs.loaded_run import model_loader
from tests.cli.runner import RECIPES, Ended, calfat
from tests.contract.distributions import install
from tests.runs.test_stop import Terminal
from tests.snapshot import TextSnapshot

METHOD = """\
from dataclasses import dataclass
from calfat_plugin import TrainerEntry, hookimpl, option

@dataclass(frozen=True)
class Options:
    share: float = option(0.5, low=0, high=1, help="a share")

@hookimpl
def calfat_local_trainers():
    yield TrainerEntry("{name}", build="{module}:Method", config=Options, summary="of a test")
"""
RECIPE = "model_args: {model: cnn_small}\ncalfat: {trainer: my-fat, evaluators: [natural]}\n"
FLAG = ("--plugin", "my_fat.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    Path("my_fat.py").write_text(METHOD.format(name="my-fat", module="my_fat"))
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def digest() -> str:
    return hashlib.sha256(Path("my_fat.py").read_bytes()).hexdigest()


def error(*arguments: str) -> str:
    ended = calfat(*arguments)
    assert (ended.code, ended.out) == (2, "")
    return ended.err.replace(str(Path.cwd()), "HERE").removeprefix("error: ").rstrip("\n")


def test_a_recipe_can_name_what_the_file_offers(snapshot: TextSnapshot) -> None:
    assert calfat("check", "r.yaml", *FLAG).out.startswith("r.yaml: good. my-fat with fedavg on ")
    assert error("check", "r.yaml").startswith("r.yaml:2: calfat.trainer: no local trainer called 'my-fat'.")
    unlike = error("check", "r.yaml", "--set", "calfat.trainer=zzz")
    assert "called 'zzz'. Install what offers it, or name its file with --plugin FILE. Known: calfat, " in unlike
    snapshot(error("check", "r.yaml", *FLAG, "--set", "calfat.trainer={name: my-fat, share: 2}"))


@pytest.mark.parametrize("words", [("check", "r.yaml", "--json"), ("schema",)], ids=" ".join)
def test_what_the_file_prints_is_not_in_the_json(words: tuple[str, ...]) -> None:
    method = METHOD.format(name="my-fat", module="my_fat").replace("yield", "print('in its hook'); yield")
    Path("my_fat.py").write_text(f"print('at import')\n{method}")
    ended = calfat(*words, *FLAG)
    assert ended.code == 0
    assert "my-fat" in json.dumps(json.loads(ended.out))
    assert {"at import", "in its hook"} <= {*ended.err.splitlines()}


def test_a_recipe_as_run_has_the_file_and_its_digest_and_is_a_recipe_again(folder: Path) -> None:
    shown = calfat("check", "r.yaml", *FLAG, "--show").out
    assert yaml.safe_load(shown)["calfat"]["plugins"] == {
        "my_fat": {"file": str(folder / "my_fat.py"), "sha256": digest()}
    }
    Path("shown.yaml").write_text(shown)
    assert calfat("check", "shown.yaml", "--show") == Ended(0, shown, "")


def test_a_changed_file_is_loaded_anew_in_one_process_and_a_second_may_import_it() -> None:
    assert calfat("check", "r.yaml", *FLAG).code == 0
    Path("my_fat.py").write_text(METHOD.format(name="renamed", module="my_fat"))
    assert calfat("check", "r.yaml", *FLAG, "--set", "calfat.trainer=renamed").code == 0
    Path("more.py").write_text(METHOD.format(name="more-fat", module="more") + "import my_fat\n")
    assert calfat("check", "r.yaml", *FLAG, "--plugin", "more.py", "--set", "calfat.trainer=more-fat").code == 0


@pytest.mark.parametrize("file", ["my_fatt.py", "nowhere/x.py", "r.yaml", "my-fat.py", "folder.py", "folderr.py"])
def test_a_file_that_is_no_plugin(file: str, snapshot: TextSnapshot) -> None:
    Path("folder.py").mkdir()
    snapshot(error("check", "r.yaml", "--plugin", file))


@pytest.mark.parametrize(
    "source",
    [
        "\n\nimport no_such",
        "def broken(:",
        "raise SystemExit",
        METHOD.format(name="x", module="bad").replace("calfat_local_trainers", "calfat_local_trainer"),
        METHOD.format(name="x", module="bad").replace("yield", ""),
        METHOD.format(name="calfat", module="bad"),
    ],
    ids=["import", "syntax", "exit", "hook", "nothing", "clash"],
)
def test_a_broken_file_is_an_error_and_not_a_report(source: str, snapshot: TextSnapshot) -> None:
    """An installed plugin that is broken is left out; this one was asked for."""
    Path("bad.py").write_text(source)
    said = error("check", str(RECIPES / "calfat_digits.yaml"), "--plugin", "bad.py")
    assert said.startswith("HERE/bad.py")
    snapshot(said, version=__version__)


def test_a_file_that_ctrl_c_ended_half_loaded_is_loaded_again() -> None:
    """In a notebook, say, while it imports torch."""
    stop = "from pathlib import Path\nif not Path('again').exists():\n    raise KeyboardInterrupt\n"
    Path("my_slow.py").write_text(stop + METHOD.format(name="slow", module="my_slow"))
    (file,) = plugin_files(with_plugins(parse_document("a: {}", "a.yaml"), ["my_slow.py"])).values()
    with pytest.raises(KeyboardInterrupt):
        file.load()
    Path("again").touch()
    assert hasattr(file.load(), "calfat_local_trainers")


def test_an_installed_plugin_is_replaced_by_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who changes an installed plugin tries it with --plugin."""
    install(folder, "my-fat", "1.0", {}, my_fat="my_fat")
    monkeypatch.syspath_prepend(folder)
    assert "offered by my-fat 1.0 (my-fat)" in calfat("plugins", "my-fat").out
    del sys.modules["my_fat"]
    assert f"offeredby{folder / 'my_fat.py'}sha256:" in "".join(calfat("plugins", "my-fat", *FLAG).out.split())
    assert "not loaded" not in calfat("plugins", *FLAG).out


SUITE = "base: r.yaml\naxes: {{method: {{Mine: {{calfat.trainer: my-fat{axis}}}}}}}\nmetrics: [natural]\nseeds: [0]\n"
FILES = "{my_fat: {file: my_fat.py}}"


@pytest.mark.parametrize("key", [f"calfat.plugins: {FILES}", "calfat.plugins.my_fat.file: my_fat.py"])
def test_a_suite_may_name_it_for_all_its_cells(key: str, folder: Path) -> None:
    Path("r.yaml").write_text(RECIPE.replace("my-fat", "calfat"))
    Path("s.yaml").write_text(SUITE.format(axis="") + f"set: {{{key}}}\n")
    assert calfat("check", "s.yaml").out == "s.yaml: good. A suite of 1 cells and 1 runs.\n"
    planned = calfat("suite", "s.yaml", "--dry-run")
    assert (planned.code, planned.err) == (0, "")
    assert f"--plugin {folder / 'my_fat.py'}" in planned.out


@pytest.mark.parametrize(
    ("axis", "more", "key"),
    [
        (f", calfat.plugins: {FILES}", "", "2: axes.method.Mine.calfat.plugins"),
        (
            "",
            f"choose: {{metric: natural, seeds: [1], grid: {{calfat.plugins: [{FILES}]}}}}\n",
            "5: choose.grid.calfat.plugins",
        ),
    ],
)
def test_a_part_of_a_suite_may_not(axis: str, more: str, key: str) -> None:
    Path("s.yaml").write_text(SUITE.format(axis=axis) + more)
    assert error("check", "s.yaml").startswith(f"s.yaml:{key}: plugins are loaded once, for all cells; ")


# --- the run directory of a stranger ----------------------------------------------------------------------------------


@pytest.fixture
def strangers_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose plugin, which leaves a mark when it is executed, this user has not run; no weights."""
    Path("my_fat.py").write_text(METHOD.format(name="my-fat", module="my_fat") + "\nopen('executed', 'w').close()\n")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "recipe.yaml").write_text(calfat("check", "r.yaml", *FLAG, "--show").out)
    (folder / "run" / "checkpoints" / "last.safetensors").write_bytes(b"")
    (folder / "executed").unlink()
    forget(folder, monkeypatch)
    return folder / "run"


def forget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user, in another process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    sys.modules.pop("my_fat", None)


REFUSED = "if you trust it, add --trust-plugins"
COMMANDS = (("attack", "run"), ("trust", "run"))


@pytest.mark.usefixtures("strangers_run")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_plugin_that_this_user_has_not_run_is_not_executed_unasked(
    command: tuple[str, ...], snapshot: TextSnapshot
) -> None:
    said = re.sub(r"yaml:\d+", "yaml:LINE", error(*command))
    assert said.startswith("run/recipe.yaml:LINE: calfat.plugins.my_fat: this run executes HERE/my_fat.py")
    snapshot(said, digest=digest())
    with pytest.raises(RecipeError, match="this run executes"):
        load_model("run")
    assert not Path("executed").exists()


@pytest.mark.usefixtures("strangers_run")
def test_a_run_that_attacks_by_a_strangers_model_says_which_command_asks() -> None:
    """``calfat run`` itself has no flag for it."""
    cpu = torch.device("cpu")
    with pytest.raises(RecipeError, match=r"if you trust it, run once: calfat attack run --trust-plugins$"):
        model_loader(None, SetUpTask(10, 1, (8, 8), cpu), cpu)("run", None)
    assert not Path("executed").exists()


@pytest.mark.usefixtures("strangers_run")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_plugin_that_stayed_with_the_stranger_is_asked_for(command: tuple[str, ...], folder: Path) -> None:
    """And not said to be read: it is not here."""
    (folder / "my_fat.py").rename(folder / "elsewhere.py")
    for more in ((), ("--trust-plugins",)):
        said = re.sub(r"yaml:\d+", "yaml:LINE", error(*command, *more))
        assert said.startswith("run/recipe.yaml:LINE: calfat.plugins.my_fat: this run executes HERE/my_fat.py, which")
        assert "which is not here. Get my_fat.py from whoever made the run" in said
    (folder / "elsewhere.py").rename(folder / "my_fat.py")
    assert "which is not here" not in calfat(*command).err


@pytest.mark.usefixtures("strangers_run")
def test_a_model_is_loaded_with_the_plugin_that_is_named(folder: Path) -> None:
    (folder / "mine").mkdir()
    moved = (folder / "my_fat.py").rename(folder / "mine" / "my_fat.py")
    with pytest.raises(RecipeError, match="which is not here"):
        load_model("run")
    with pytest.raises(PluginError, match="'my_fat:Method' does not import"):  # it comes so far, and has no method
        load_model("run", plugins=moved)
    assert Path("executed").exists()


@pytest.mark.usefixtures("strangers_run")
@pytest.mark.parametrize(("command", "way"), itertools.product(COMMANDS, ("flag", "plugin", "known")), ids=str)
def test_it_is_executed_once_the_user_agrees_or_names_it_or_has_run_it(
    command: tuple[str, ...], way: str, folder: Path
) -> None:
    """What then fails is the rest of the run directory, which is empty."""
    further: tuple[str, ...] = ("--trust-plugins",)
    if way == "plugin":
        further = FLAG
    elif way == "known":
        assert calfat("check", "r.yaml", *FLAG).code == 0
        (folder / "executed").unlink()
        sys.modules.pop("my_fat")
        further = ()
    ended = calfat(*command, *further)
    assert (ended.code, Path("executed").exists()) == (2, True)
    assert REFUSED not in ended.err
    assert REFUSED not in calfat(*command).err, "now it is known"
    (folder / "my_fat.py").write_text(METHOD.format(name="my-fat", module="my_fat"))
    changed = (folder / "run" / "recipe.yaml").read_text()
    (folder / "run" / "recipe.yaml").write_text(re.sub(r"sha256: \w+", f"sha256: {digest()}", changed))
    assert REFUSED in calfat(*command).err, "other content"


@pytest.mark.usefixtures("strangers_run")
@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [("n", 2, REFUSED), ("y", 2, "error: "), ("\x03", 130, "error: stopped."), ("\x04", 2, REFUSED)],
    ids=["no", "yes", "Ctrl-C", "end of input"],
)
def test_at_a_terminal_the_user_is_asked(answer: str, code: int, said: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent), "TERM": "dumb"}
    with Terminal("attack", "run", cwd=folder, env=environment, columns=400) as terminal:
        terminal.read_until(r"It acts with your permissions\. Execute it\? \[y/N\]: ")
        assert f"This run executes {folder}/my_fat.py" in terminal.text
        assert f"(SHA-256 {digest()}), which you have not run before." in terminal.text
        assert not Path("executed").exists()
        terminal.type(f"{answer}\n")  # a signal between the question and the reading is seen after a line only
        ended = terminal.finish()
    assert (ended.code, said in ended.out.replace("\n", " ")) == (code, True)
    assert "Aborted!" not in ended.out
    assert (REFUSED in ended.out.replace("\n", " ")) == (said == REFUSED)
    assert Path("executed").exists() == (answer == "y")


@pytest.mark.usefixtures("strangers_run")
def test_where_nothing_can_be_noted_the_user_is_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    assert REFUSED not in calfat("attack", "run", "--trust-plugins").err
    assert Path("executed").exists()
    assert REFUSED in calfat("attack", "run").err


def test_two_files_of_one_module_and_one_called_like_a_module_are_refused(snapshot: TextSnapshot) -> None:
    Path("other").mkdir()
    Path("other/my_fat.py").write_text(Path("my_fat.py").read_text())
    snapshot(error("check", "r.yaml", *FLAG, "--plugin", "other/my_fat.py"))
    assert calfat("check", "r.yaml", *FLAG, "--plugin", "other/../my_fat.py").code == 0
    Path("json.py").write_text("")
    said = error("check", "r.yaml", "--plugin", "json.py")
    assert said.startswith("HERE/json.py: there is a module 'json' already (/")


@pytest.mark.parametrize("plugins", ["my_fat.py", "{my_fat: {}}", "{fat: {file: my_fat.py}}"])
def test_a_section_of_a_recipe_that_lists_no_files(plugins: str, snapshot: TextSnapshot) -> None:
    Path("r.yaml").write_text(RECIPE.replace("my-fat,", f"calfat, plugins: {plugins},"))
    said = error("check", "r.yaml")
    assert said.startswith("r.yaml:2: calfat.plugins")
    snapshot(said)


def test_a_file_that_is_not_what_the_recipe_says(snapshot: TextSnapshot) -> None:
    then = digest()
    named = f"my-fat, plugins: {{my_fat: {{file: my_fat.py, sha256: {then}}}}},"
    Path("r.yaml").write_text(RECIPE.replace("my-fat,", named))
    assert calfat("check", "r.yaml").code == 0
    Path("my_fat.py").write_text("# another\n")
    snapshot(error("check", "r.yaml"), then=then[:12], now=digest()[:12])
    Path("my_fat.py").unlink()
    snapshot(error("check", "r.yaml"))
