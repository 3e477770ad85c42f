"""The plugin of docs/hooks.md, word for word, installed as a distribution of its own: a recipe runs it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import Ended
from tests.contract.distributions import install
from tests.contract.new_environment import NewEnvironment
from tests.contract.test_hooks import PAGE

DIARY = """
import json
from calfat_plugin import hookimpl

def write(run, **heard):
    with (run.directory / "diary.jsonl").open("a") as file:
        file.write(json.dumps(heard) + "\\n")

@hookimpl
def calfat_run_started(run):
    write(run, started=run.start_round, rounds=run.num_rounds, trainer=run.recipe["calfat"]["trainer"])

@hookimpl
def calfat_round_finished(run, record):
    written = (run.directory / "rounds.csv").read_text().count("\\n") - 1
    write(run, round=record.round, clients=record.clients, rows=written)

@hookimpl
def calfat_run_finished(run, result):
    write(run, finished=[e.label for e in result.evaluations], results=(run.directory / "results.json").exists())

@hookimpl
def calfat_run_stopped(run, error):
    write(run, stopped=str(error))
"""


def quoted(file: str) -> str:
    """A file as the page shows it."""
    found = re.search(rf"^`{re.escape(file)}`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/hooks.md does not show {file}"
    return found[1]


@dataclass(frozen=True)
class Site:
    """A folder with the recipe, and an environment with the distributions."""

    folder: Path
    environment: NewEnvironment

    def calfat(self, *arguments: str) -> Ended:
        """Run ``calfat`` in the environment."""
        return self.environment.shell(shlex.join(["calfat", *arguments]), self.folder)

    @property
    def diary(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "diary.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    environment = NewEnvironment.make(folder / "environment")
    for file in ("half_fat.py", "pyproject.toml", "half_fat.yaml"):
        (folder / file).write_text(quoted(file))
    (command,) = re.findall(r"^```sh\n(pip install .*)\n```", PAGE, re.MULTILINE)
    done = environment.shell(command, folder)
    assert done.code == 0, done.err
    install(environment.site_packages, "my-diary", "1", {"my_diary": DIARY}, diary="my_diary")
    return Site(folder, environment)


def test_it_is_found_and_explained(site: Site) -> None:
    assert len(quoted("half_fat.py").splitlines()) <= 40  # as short as the page says
    shown = site.calfat("plugins", "half-fat")
    assert (shown.code, shown.err) == (0, "")
    lines = [line.strip() for line in shown.out.splitlines()]
    assert lines[0] == "half-fat (local trainer), offered by half-fat 0.1 (half-fat)"
    assert {"min r CE(f(x~), y) + (1 - r) CE(f(x), y)", "• Loss modifiers: plain, calibrated"} < {*lines}
    assert "share  a number, 0 <= value <= 1  0.5      r, weight of the adversarial" in lines


def test_its_options_are_checked(site: Site) -> None:
    ended = site.calfat("check", "half_fat.yaml", "--set", "calfat.trainer.share=2")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: --set calfat.trainer.share=2: calfat.trainer.share: got 2 (int), expected")


def test_a_recipe_runs_it_and_hooks_hear_of_the_run(site: Site) -> None:
    """One test, because the run is dear: a round of the page's recipe, made small."""
    small = ["train_args.comm_round=1", "train_args.client_num_in_total=2", "data_args.partition_method=iid"]
    quick = ["calfat.evaluators=[natural]", "calfat.monitor.evaluators=[natural]", "calfat.threat.steps=1"]
    settings = [word for setting in small + quick for word in ("--set", setting)]
    ended = site.calfat("run", "half_fat.yaml", "--run-dir", "run", *settings)
    assert ended.code == 0, ended.err

    results = json.loads((site.folder / "run" / "results.json").read_text())
    assert [(result["label"], result["num_examples"]) for result in results["evaluations"]] == [("natural", 359)]
    environment = json.loads((site.folder / "run" / "environment.json").read_text())
    assert {"half-fat 0.1 (half-fat)", "my-diary 1 (diary)"} <= set(environment["plugins"])

    started, finished_round, finished = site.diary
    trainer = started.pop("trainer")
    assert (trainer["name"], trainer["share"], trainer["loss"]["name"]) == ("half-fat", 0.7, "calibrated")
    assert started == {"started": 1, "rounds": 1}
    assert finished_round == {"round": 1, "clients": [0, 1], "rows": 1}
    assert finished == {"finished": ["natural"], "results": True}
