"""Odd files, odd YAML, lost output and misspelt commands: each ends in a message, never in a traceback or a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calfat_plugin import RecipeError, run
from calfat_plugin.cli.main import COMMANDS
from tests.cli.runner import COMMAND, RECIPES, ROOT, Ended, calfat, python, refused

pytestmark = pytest.mark.usefixtures("in_a_folder")
RECIPE = RECIPES / "calfat_digits.yaml"
GOOD = "good. calfat with fedavg on digits (dirichlet), cnn_small: 5 clients, 5 a round, 40 rounds, seed 0, on FedML.\n"
LONG = "a" * 5000
SHORT = "a" * 117 + "..."


def shell(script: str, *words: str) -> Ended:
    """A line of bash, in which ``$0`` is Python."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", script, sys.executable, *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    return Ended(done.returncode, done.stdout, done.stderr)


# --- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("!!bool maybe", "train_args.epochs: 'maybe' (text) is no !!bool; remove the tag."),
        ("!!timestamp x", "train_args.epochs: 'x' (text) is no !!timestamp; remove the tag."),
        ("!!int ''", "train_args.epochs: '' (text) is no !!int; remove the tag."),
        ("!!float ''", "train_args.epochs: '' (text) is no !!float; remove the tag."),
        ("&a [*a]", "train_args: values are nested more than 20 deep."),
        ("&a {b: *a}", "train_args: values are nested more than 20 deep."),
        ("!!map x", "train_args.epochs: the tag tag:yaml.org,2002:map is not allowed in a recipe; remove it."),
        ("!!binary aGk=", "train_args.epochs: the tag tag:yaml.org,2002:binary is not allowed in a recipe; remove it."),
        ("!!python/name:os.system x", "train_args.epochs: the tag tag:yaml.org,2002:python/name:os.system is not "),
        ("=", "train_args.epochs: got '=' (text), expected a whole number, >= 1."),
    ],
)
def test_odd_yaml_is_refused_in_words(value: str, complaint: str) -> None:
    override = f"train_args.epochs={value}"
    ended = calfat("check", str(RECIPE), "--set", override)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"error: --set {override}: {complaint}")
    assert ended.err.count("\n") == 1
    Path("r.yaml").write_text(f"train_args:\n  epochs: {value}\ncalfat: {{}}\n")
    ended = calfat("check", "r.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(("error: r.yaml:2: ", "error: r.yaml:1: train_args: values are nested"))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [LONG, f"{LONG}/r.yaml"])
def test_a_path_that_is_too_long_is_refused(path: str) -> None:
    for command in ("check", "run", "suite"):
        assert calfat(command, path) == refused(f"{SHORT}: cannot be read (File name too long).")
    why = f"{SHORT}: cannot be used (File name too long). Check this path and its permissions."
    for words in (("report", path), ("attack", path), ("run", str(RECIPE), "--run-dir", path)):
        assert calfat(*words) == refused(why)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
def test_a_file_without_end_is_read_as_far_as_a_recipe_can_go() -> None:
    assert calfat("check", "/dev/zero") == refused(
        "/dev/zero: more than 256000 bytes are too many for a recipe (256 kB at most)."
    )


def test_a_recipe_comes_through_a_pipe() -> None:
    for before in ("", "sleep 0.3; "):  # the writer may take its time
        piped = shell(f'({before}cat "$1") | "$0" -c "$2" check /dev/stdin', str(RECIPE), COMMAND)
        assert piped == Ended(0, f"/dev/stdin: {GOOD}", "")
    substituted = shell('"$0" -c "$2" check <(cat "$1")', str(RECIPE), COMMAND)
    assert (substituted.code, substituted.err) == (0, "")
    assert substituted.out.endswith(f": {GOOD}")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_texts_as_windows_writes_them(encoding: str) -> None:
    """UTF-8 with its mark is read; UTF-16 is refused as any binary file."""
    Path("r.yaml").write_bytes(RECIPE.read_text().replace("\n", "\r\n").encode(encoding))
    binary = refused("r.yaml:1: byte 0 is not UTF-8 text; expected a YAML recipe, not a binary file.")
    assert calfat("check", "r.yaml") == (Ended(0, f"r.yaml: {GOOD}", "") if encoding == "utf-8-sig" else binary)


# --- output -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("line", "unbuffered"), [("check calfat_digits", ""), ("plugins", "1"), ("--help", ""), ("--help", "1")]
)
def test_an_output_that_cannot_be_written_is_an_error(line: str, unbuffered: str) -> None:
    said = "error: standard output cannot be written (No space left on device).\n"
    assert shell(f'PYTHONUNBUFFERED={unbuffered} "$0" -c "$1" {line} >/dev/full', COMMAND) == Ended(2, "", said)


def test_an_error_that_cannot_be_shown_keeps_its_exit_code() -> None:
    for redirection in ("2>/dev/full", "2>&-"):
        assert shell(f'"$0" -c "$1" check nope.yaml {redirection}', COMMAND).code == 2


STREAMS = """
import os, subprocess, sys
from calfat_plugin.cli.main import main
main(["--version"], standalone_mode=False)
streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
said = [*(stream.isatty() for stream in streams), *(os.get_inheritable(number) for number in range(3))]
said.append(subprocess.run(["sh", "-c", "cat; echo out; echo err >&2"]).returncode)
with open(sys.argv[1], "w") as file:
    print(*said, file.fileno() > 2, file=file)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_not_there_lead_nowhere(tmp_path: Path, closed: str) -> None:
    """Libraries that ask ``sys.__stdout__`` something, and programs that are started, find all three."""
    done = shell(f'"$0" -c "$1" "$2" {closed}', STREAMS, str(tmp_path / "said"))
    assert done.code == 0, done.err
    assert (tmp_path / "said").read_text().split() == [*["False"] * 6, *["True"] * 3, "0", "True"]


# --- words ------------------------------------------------------------------------------------------------------------


def test_a_misspelt_command_or_option_gets_a_suggestion() -> None:
    commands = ", ".join(COMMANDS)
    for arguments, said in (
        (("chek", "r.yaml"), "Error: No such command 'chek'. Did you mean 'check'?"),
        (("xyzzy",), f"Error: No such command 'xyzzy'. Commands: {commands}."),
        (("run", "r.yaml", "--resum"), "--resume"),  # click's own words
    ):
        ended = calfat(*arguments)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err.splitlines()[-1], ended.err


def test_recipes_and_suites_in_the_place_of_each_other_are_pointed_to_their_command() -> None:
    recipe, suite = RECIPES / "fedpgd_digits.yaml", RECIPES.parent / "studies" / "paper" / "small_table1.yaml"
    assert calfat("suite", str(recipe)) == refused(f"{recipe}: this is a recipe. Run it with: calfat run {recipe}")
    said = f"--show: {suite} is a suite, not one recipe. List its runs with: calfat suite {suite} --dry-run"
    assert calfat("check", str(suite), "--show") == refused(said)
    said = f"{suite}: this is a suite. Run it with: calfat suite {suite}"
    assert calfat("run", str(suite)) == refused(said)
    for given, at in ((suite, suite), ({"title": "Table 1", "axes": {}}, "recipe")):
        with pytest.raises(RecipeError, match=rf"^{at}: this is a suite\. Run it with: calfat suite "):
            run(given)


# --- plugins ----------------------------------------------------------------------------------------------------------


def test_no_text_of_a_plugin_s_exception_drives_the_terminal() -> None:
    hook = "from calfat_plugin import hookimpl\n\n@hookimpl\ndef calfat_evaluators():\n    raise {}\n"
    Path("broken.py").write_text(hook.format("ValueError('\\x1b[31mred')"))
    where = f"{Path.cwd() / 'broken.py'}: ValueError: \ufffd[31mred"
    assert calfat("plugins", "--plugin", "broken.py") == refused(where)
    Path("stopping.py").write_text(hook.format("GeneratorExit('\\x1b[31mred')"))  # passes as a bug of ours
    ended = python(COMMAND, "plugins", "--plugin", "stopping.py")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("Traceback (most recent call last):\n  File ")
    assert ended.err.endswith("\nGeneratorExit: \ufffd[31mred\n")
    assert "\x1b" not in ended.err


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "read"),
    [
        (("check", "pipe.yaml"), "pipe.yaml"),
        (("suite", "pipe.yaml", "--dry-run"), "pipe.yaml"),
    ],
)
def test_ctrl_c_ends_every_command_alike(command: tuple[str, ...], read: str) -> None:
    os.mkfifo(read)
    search = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *command],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        written = None
        while written is None and process.poll() is None:  # until the command reads, or ends without
            with contextlib.suppress(OSError):
                written = os.open(read, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        if written is not None:
            os.close(written)
    assert (process.returncode, out, err) == (130, "", "error: stopped.\n")


KILLED = """
import importlib, os, signal
from calfat_plugin.cli.main import main

def kill(*arguments, **options):
    os.kill(os.getpid(), signal.{signal})

module = importlib.import_module("calfat_plugin.cli.{module}")
module.{part} = kill
main(prog_name="calfat")
"""
AGAIN = {
    "attack": "The same command again continues inside AutoAttack where it stopped; other attacks start again.\n",
    "trust": "The same command again continues with the check that was stopped.\n",
}


@pytest.mark.parametrize(
    ("command", "part", "name"),
    [("attack", "measure", "SIGTERM"), ("attack", "planned", "SIGHUP"), ("trust", "examine", "SIGHUP")],
)
def test_a_polite_kill_ends_what_works_long_as_ctrl_c_does(command: str, part: str, name: str) -> None:
    model = ["--model", "cnn_small", "--weights", "w.pt", "--dataset", "digits"]
    Path("w.pt").write_bytes(b"")
    ended = python(KILLED.format(signal=name, module=command, part=part), command, *model)
    again = "" if part == "planned" else AGAIN.get(command, "")
    assert ended == Ended(130, "", f"error: stopped.\n{again}")
