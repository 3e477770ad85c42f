"""Keys that FedML reads: each is in the table, and none of them promises in a recipe what a run does not do."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from calfat_plugin.options import describe_options
from calfat_plugin.recipe.host_keys import BY_NAME, HOST_KEYS, Effect
from calfat_plugin.recipe.schema import HOST_SECTIONS
from calfat_plugin.report import write_run_report
from tests.cli.runner import RECIPES, Ended, calfat
from tests.recipe.test_bad_recipes import GOOD, SAID_OF_GOOD, Bad, blocks
from tests.report.made import made_run

OURS = {info.name for config in HOST_SECTIONS.values() for info in describe_options(config)}
PAGE = (Path(__file__).parent / "host_keys.txt").read_text()
GIVEN = list(blocks(PAGE))
ACCEPTED = [each for each in GIVEN if not each.message]

# --- the table against the installed host -----------------------------------------------------------------------------

# Methods of its Arguments class, of lists that are called args too, and of objects in general.
NO_KEYS = {"__dict__", "append", "insert", "load_yaml_config", "self", "set_attr_from_config"}


@dataclass(frozen=True)
class Read:
    """A key that a file of the host reads."""

    key: str
    file: str


def host_folder() -> Path:
    spec = importlib.util.find_spec("fedml")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def reads(folder: Path) -> Iterator[Read]:
    """Every ``args.key``, ``getattr(args, "key")`` and ``hasattr(args, "key")`` of the whole wheel, with any prefix
    before ``args``. Defences call their arguments ``config``."""
    for path in sorted(folder.rglob("*.py")):
        names = {"args", "config"} if "defense" in path.parts else {"args"}
        with warnings.catch_warnings():  # of escape sequences in the host's texts
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder, key = node.value, node.attr
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                holder, name = node.args[0], node.args[1]
                if not isinstance(name, ast.Constant):
                    continue
                key = str(name.value)
            else:
                continue
            if getattr(holder, "id", getattr(holder, "attr", None)) in names:
                yield Read(key, str(path.relative_to(folder)))


def test_every_key_that_the_host_reads_is_in_the_table() -> None:
    """Those of the whole wheel, not only of the modules that a run imports: people copy keys from any example."""
    found = {read.key: read.file for read in reads(host_folder()) if read.key not in NO_KEYS}
    assert len(found) > 250, "the scan must see the host"
    assert {"enable_dp", "krum_param_m", "nesterov", "byzantine_client_num", "server_lr", "epochs"} <= set(found)
    missing = {key: file for key, file in found.items() if key not in BY_NAME and key not in OURS}
    assert missing == {}


def test_the_examples_that_the_host_ships_are_all_known() -> None:
    for file in host_folder().glob("config/**/*.yaml"):
        for section, values in yaml.safe_load(file.read_text()).items():
            assert section in HOST_KEYS
            assert set(values) <= {*BY_NAME, *OURS}


def test_a_key_has_one_meaning() -> None:
    assert len(BY_NAME) == sum(map(len, HOST_KEYS.values()))
    assert OURS & set(BY_NAME) == set()
    assert all(row.text for row in BY_NAME.values() if row.effect is not Effect.ACTS)
    assert all(row.switch in (*BY_NAME, *OURS) for row in BY_NAME.values() if row.switch)


@pytest.mark.parametrize("effect", [Effect.OVERRIDDEN, Effect.RENAMED])
def test_what_decides_instead_exists(effect: Effect) -> None:
    sections = {name: {info.name for info in describe_options(config)} for name, config in HOST_SECTIONS.items()}
    for key, row in BY_NAME.items():
        section, dot, name = row.text.partition(".")
        if row.effect is effect and dot and section in sections:
            assert name.split()[0] in (*sections[section], *HOST_KEYS[section]), key


# --- recipes with such keys -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_are_as_many_as_were_promised() -> None:
    assert len({each.name for each in GIVEN}) == len(GIVEN) >= 40


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("given", [each for each in GIVEN if each.message], ids=lambda each: each.name)
def test_a_key_that_promises_too_much_is_refused(given: Bad, command: str) -> None:
    Path("r.yaml").write_text(given.recipe)
    assert calfat(command, "r.yaml") == Ended(2, "", f"error: {given.message}\n")


@pytest.mark.parametrize("given", ACCEPTED, ids=lambda each: each.name)
def test_a_key_without_effect_is_named_and_then_left_out(given: Bad) -> None:
    Path("r.yaml").write_text(given.recipe)
    said = "".join(f"warning: {warning}\n" for warning in given.warnings)
    assert calfat("check", "r.yaml") == Ended(0, SAID_OF_GOOD, said)
    refusal = f"error: r.yaml: {len(given.warnings)} warning; --strict allows none.\n"
    strict = Ended(2, "", said + refusal) if said else Ended(0, SAID_OF_GOOD, "")
    assert calfat("check", "r.yaml", "--strict") == strict
    written = yaml.safe_load(calfat("check", "r.yaml", "--show").out)
    passed_on = {key for section in written if section != "calfat" for key in written[section]} - OURS
    expected = {"wandb_project", "wandb_entity", "run_name"} if given.name == "W&B with its keys" else set()
    assert passed_on == expected


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.name)
def test_a_shipped_recipe_draws_no_warning(file: Path) -> None:
    """Suites: ``tests/suites/test_shipped.py``."""
    ended = calfat("check", str(file), "--strict")
    assert (ended.code, ended.err) == (0, "")


def test_a_suite_is_as_strict() -> None:
    Path("base.yaml").write_text(GOOD.replace("  epochs: 1", "  early_stopping: true"))
    Path("s.yaml").write_text(
        "base: base.yaml\nseeds: [0]\nmetrics: [natural]\n"
        "axes: {a: {b: {train_args.dampening: 1, train_args.batch_size: 32}, c: {}}}\n"
    )
    ended = calfat("check", "s.yaml", "--strict")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1] == "error: s.yaml: 2 warnings; --strict allows none."


def test_nothing_without_effect_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calfat_plugin.report.charts.FORMATS", {})  # figures on the page, none beside it
    page = write_run_report(
        made_run(
            tmp_path / "run",
            "train_args.early_stopping=true",
            "train_args.server_lr=0.81259",
            "train_args.federated_optimizer=FedProx",
            "dp_args.enable_dp=false",
            "dp_args.epsilon=0.06257",
            final={"natural": 0.5},
        )
    )
    for text in (page.read_text(), (tmp_path / "run" / "recipe.yaml").read_text()):
        for word in ("early_stopping", "server_lr", "0.81259", "FedProx", "enable_dp", "0.06257"):
            assert word not in text


WITHOUT_ALPHA = GOOD.replace("partition_method: dirichlet", "partition_method: iid")
ALPHA = "data_args.partition_alpha: this key has no effect here: the partition 'iid' does not use it.\n"


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (WITHOUT_ALPHA, (), f"warning: r.yaml:2: {ALPHA}"),
        (WITHOUT_ALPHA.replace(", partition_alpha: 0.1", ""), (), ""),
        (GOOD, ("data_args.partition_method=iid",), ""),  # it replaces what the file chose together
        (
            GOOD,
            ("data_args.partition_method=iid", "data_args.partition_alpha=0.3"),
            f"warning: --set data_args.partition_alpha=0.3: {ALPHA}",
        ),
        (
            WITHOUT_ALPHA.replace(", partition_alpha: 0.1", ""),
            ("calfat.trainer={name: calfat, preset: paper}",),  # the preset's concentration is not what the user wrote
            "",
        ),
    ],
    ids=["in the file", "without", "partition overridden", "both overridden", "of a preset"],
)
def test_a_concentration_that_the_partition_does_not_use_is_named(
    recipe: str, overrides: tuple[str, ...], said: str
) -> None:
    Path("r.yaml").write_text(recipe)
    ended = calfat("check", "r.yaml", *(word for override in overrides for word in ("--set", override)))
    assert (ended.code, ended.err) == (0, said)
