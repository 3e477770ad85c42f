"""docs/cross_silo.md, followed to the letter: every command of the page is typed into a shell.

One machine plays all of the page's. Each is a folder and a terminal that stays open, as the page asks for; names of
machines become :data:`LOOPBACK`, their ports become free ones, and ``scp`` copies between folders.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from calfat_plugin.experiment import assemble
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.recipe.document import Document
from calfat_plugin.registry import Registry
from tests.silo.broker import needs_mosquitto
from tests.silo.federation import assert_same_bits, free_ports, global_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cross_silo.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent  # not resolved: the environment's, where its python is a link
PATIENCE = 300.0  # seconds that a command may take
FENCED = r"^( *)```(\w*)\n(.*?)^\1```$"

LOOPBACK = {"fl.example.org": "127.0.0.1", "wards.example.org": "127.0.0.1"}
FIRST = next(iter(LOOPBACK))  # where the page's recipe is written
SCP = '#!/bin/bash\nto=${@: -1}\nexec cp -- "${@:1:$#-1}" "$MACHINES/${to/://}"\n'


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, and what the line before it says."""

    section: str
    language: str
    text: str
    before: str

    @property
    def commands(self) -> list[str]:
        """Its lines without comments; one that ends in a backslash goes on in the next."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]

    @property
    def machine(self) -> str:
        """Where to type it."""
        named = re.match(r"# on (\S+)\n", self.text)
        assert named is not None, f"the page does not say where to type:\n{self.text}"
        assert named[1] in LOOPBACK
        return named[1]


def parse(page: str) -> list[Block]:
    """All fenced blocks of a page."""
    blocks = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        for fence in re.finditer(FENCED, body, re.MULTILINE | re.DOTALL):
            text = re.sub(rf"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
            before = body[: fence.start()].rstrip().rpartition("\n")[2]
            blocks.append(Block(title, fence[2], text, before))
    return blocks


BLOCKS = parse(PAGE)
COMMANDS = [command for block in BLOCKS if block.language == "sh" for command in block.commands]
SECTIONS = list(dict.fromkeys(block.section for block in BLOCKS if block.language == "sh"))
RECIPE = next(block.text for block in BLOCKS if block.language == "yaml")


class Loopback:
    """Puts this machine's addresses in the place of the page's; a port of the page is the same port throughout."""

    def __init__(self) -> None:
        self._ports: dict[tuple[str, str], int] = {}
        self._free = iter(free_ports(20))

    def __call__(self, text: str) -> str:
        for host, address in LOOPBACK.items():
            text = re.sub(
                rf"{re.escape(host)}:(\d+)",
                lambda found, host=host, address=address: f"{address}:{self._port(host, found[1])}",  # type: ignore[misc]
                text,
            )
            text = re.sub(
                rf"-H {re.escape(host)} -p (\d+)",  # as moto's server takes it
                lambda found, host=host, address=address: f"-H {address} -p {self._port(host, found[1])}",  # type: ignore[misc]
                text,
            )
            text = re.sub(rf"{re.escape(host)}(?!:)", address, text)  # scp's host:folder stays
        return text

    def _port(self, host: str, port: str) -> int:
        if (host, port) not in self._ports:
            self._ports[host, port] = next(self._free)
        return self._ports[host, port]


class Terminal:
    """A shell that stays open: what is typed runs in it line by line, and knows the jobs of the lines before."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder, self._screen = folder, folder / "screen.txt"
        orders, self._type = os.pipe()
        self._status, statuses = os.pipe()
        program = (
            f'while IFS= read -r -d "" line <&{orders}; do '
            f'eval "$line" </dev/null {orders}<&- {statuses}>&-; echo $? >&{statuses}; done'
        )
        with self._screen.open("wb") as screen:
            self._shell = subprocess.Popen(
                ["bash", "-c", program],
                cwd=folder,
                env={**environment, "HOME": str(folder)},
                pass_fds=(orders, statuses),
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all that was started from it can be ended
            )
        os.close(orders)
        os.close(statuses)

    def run(self, command: str) -> int:
        """Type a command and wait until the next can be typed; its exit status."""
        os.write(self._type, command.encode() + b"\0")
        ready, _, _ = select.select([self._status], [], [], PATIENCE)
        assert ready, f"{command}: still at it after {PATIENCE:g} s\n{self.screen}"
        status = os.read(self._status, 100)
        assert status, f"{command}: the shell is gone\n{self.screen}"
        return int(status)

    @property
    def screen(self) -> str:
        """What was printed, here or into a file that a command was told to write."""
        written = [*self.folder.glob("*.txt"), *self.folder.glob("*/*.txt")]
        return "\n".join(path.read_text(errors="replace") for path in sorted(written))

    def close(self) -> None:
        """End the shell and whatever it left running."""
        os.close(self._type)
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(20)
        os.close(self._status)


@contextlib.contextmanager
def terminals(folder: Path) -> Iterator[dict[str, Terminal]]:
    """A terminal on each of the page's machines."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "scp").write_text(SCP)
    (programs / "scp").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(programs), str(BIN), os.environ["PATH"], "/usr/sbin"]),
        "MACHINES": str(folder),
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",  # what the page installs is there
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
    }
    opened = {name: Terminal(folder / name, environment) for name in LOOPBACK}
    try:
        yield opened
    finally:
        for terminal in opened.values():
            terminal.close()


def walk(section: str, machines: dict[str, Terminal]) -> list[str]:
    """Do what a section says, from its first block to its last; returns the commands that were run."""
    local, done = Loopback(), []
    (machines[FIRST].folder / "recipe.yaml").write_text(local(RECIPE))  # sections go by the recipe of the first
    for block in (block for block in BLOCKS if block.section == section):
        saved = re.search(r"save this as `([\w.-]+)`:$", block.before)
        if saved is not None:
            (machines[FIRST].folder / ".saved").write_text(local(block.text))
            assert machines[FIRST].run(f"cp ~/.saved {saved[1]}") == 0
        for command in block.commands if block.language == "sh" else []:
            status = machines[block.machine].run(local(command))
            assert status == 0, f"{command}: exit status {status}\n{machines[block.machine].screen}"
            done.append(command)
    return done


def finished_runs(machine: Terminal) -> list[Path]:
    """The servers' run directories, oldest first, all of them complete."""
    directories = sorted(path.parent for path in machine.folder.rglob("recipe/0-*/recipe.yaml"))
    rounds = yaml.safe_load(RECIPE)["train_args"]["comm_round"]
    for directory in directories:
        assert (directory / "results.json").is_file()
        assert (directory / "report.html").is_file()
        assert not (directory / "partition.json").exists()
        with (directory / "rounds.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["round"]) for row in rows] == list(range(1, rounds + 1))
        assert {(row["clients"], row["refused"]) for row in rows} == {("0 1", "")}
    return directories


def shape(line: str) -> str:
    """A line without its numbers."""
    return re.sub(r"\d[\d.:]*", "#", line.strip())


installed = pytest.mark.skipif(
    not (BIN / "calfat").exists(), reason="calfat-plugin is not installed in this environment"
)


MARKS = {  # the quicker sections run in every test
    "Two machines, step by step": pytest.mark.slow,
    "MPI": pytest.mark.slow,
    "MQTT and S3": (pytest.mark.slow, needs_mosquitto),
}


@installed
@pytest.mark.parametrize(
    "section",
    [pytest.param(section, marks=MARKS.get(section, ())) for section in SECTIONS],
)
def test_every_command_does_what_the_page_says(section: str, tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block.section == section]
    with terminals(tmp_path) as machines:
        done = walk(section, machines)
        assert done == [command for block in blocks if block.language == "sh" for command in block.commands]
        assert finished_runs(machines[FIRST])
        seen = {shape(line) for terminal in machines.values() for line in terminal.screen.splitlines()}
        shown = [line for block in blocks if block.language == "text" for line in block.text.splitlines()]
        assert [line for line in shown if shape(line) not in seen] == []
        if section == SECTIONS[0]:
            check_two_machines(*machines.values())


def check_two_machines(server: Terminal, clients: Terminal) -> None:
    """What the page promises of its walk besides: the same bits in spite of kills, and secrets that stay."""
    rehearsed, run = finished_runs(server)
    assert_same_bits(global_model(rehearsed), global_model(run))
    ended = sorted(path.parent.parent.name for path in clients.folder.rglob("finished.json"))
    assert ended == ["rank-1", "rank-2"]
    keys = {path.name: path.stat().st_mode & 0o077 for path in clients.folder.rglob("*.key")}
    assert keys == {"rank-1.key": 0, "rank-2.key": 0}


# --- the page itself --------------------------------------------------------------------------------------------------


def test_no_command_stands_outside_the_blocks_that_are_run() -> None:
    assert {block.language for block in BLOCKS} <= {"sh", "yaml", "text"}
    assert len(re.findall(r"^ *```\w*$", PAGE, re.MULTILINE)) == 2 * len(BLOCKS)
    programs = {"fedml", "python", *(command.split()[0] for command in COMMANDS)}
    prose = re.sub(FENCED, "", PAGE, flags=re.MULTILINE | re.DOTALL)
    inline = [span for span in re.findall(r"`([^`]+)`", prose) if span.split()[0] in programs and len(span.split()) > 1]
    assert [span for span in inline if not any(command.startswith(span) for command in COMMANDS)] == []


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.section
)
def test_recipes_are_understood(block: Block) -> None:
    """Each is the page's recipe, or a change of it."""
    content: dict[str, Any] = yaml.safe_load(RECIPE)
    change: dict[str, Any] = yaml.safe_load(block.text)
    calfat = change.pop("calfat", {})
    content.update(change)
    content["calfat"]["silo"].update(calfat.pop("silo", {}))
    content["calfat"].update(calfat)
    experiment = assemble(Document("cross_silo.md", content), Registry.load(entry_points=False))
    supported_runtime(experiment)
    assert experiment.recipe.warnings == ()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
