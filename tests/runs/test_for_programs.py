"""What other programs read: ``--json``, and the files of a run, which docs/run_directory.md describes.

With ``--json`` standard output is one document, and what a command prints while it works is on stderr.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from calfat_plugin import rounds_csv
from calfat_plugin.results import RESULTS_FORMAT, EvaluationResult
from calfat_plugin.runs.directory import CHECKPOINTS
from tests.cli.runner import ROOT
from tests.runs import columns
from tests.runs.processes import RECIPE, WarmServer
from tests.silo.federation import RECIPE as SILO
from tests.snapshot import TextSnapshot

PAGE = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that ``run --json`` made."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "tiny.yaml").write_text(RECIPE)
    options = ("--run-dir", "run", "--set", "train_args.comm_round=1")
    done = warm.run("run", "tiny.yaml", *options, "--json", cwd=folder, WITHOUT_REPORT="")
    assert done.code == 0
    assert json.loads(done.out) == {"run": "run", "results": json.loads((folder / "run" / "results.json").read_text())}
    assert "round 1/1" in done.err
    return folder


def test_results_of_a_newer_format_are_refused(
    folder: Path, warm: WarmServer, tmp_path: Path, snapshot: TextSnapshot
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("recipe.yaml", "rounds.jsonl", "results.json"):
        (run / name).write_text((folder / "run" / name).read_text())
    content = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**content, "format": RESULTS_FORMAT + 1}))
    refused = warm.run("report", "run", cwd=tmp_path)
    assert refused.code == 2
    snapshot(refused.err)


def test_an_attack_prints_its_results_file(folder: Path, warm: WarmServer) -> None:
    done = warm.run("attack", "run", "--attacks", "fgsm", "--output", "attack.json", "--json", cwd=folder)
    assert json.loads(done.out) == {"file": "attack.json", "results": json.loads((folder / "attack.json").read_text())}
    assert "results: attack.json" in done.err
    printed = json.loads(warm.run("report", "run", "--json", cwd=folder).out)
    assert printed == {"report": "run/report.html", "runs": ["run"]}


def test_a_suite_prints_its_plan_and_its_table(folder: Path, warm: WarmServer) -> None:
    (folder / "two.yaml").write_text(
        "base: tiny.yaml\nset: {train_args.comm_round: 1}\nseeds: [3]\nmetrics: [natural]\n"
        "axes: {method: {CalFAT: {}, FedPGD: {calfat.trainer: fedpgd}}}\nskip: {FedPGD: to be quick}\n"
    )
    (plan,) = [json.loads(warm.run("suite", "two.yaml", "--dry-run", "--json", cwd=folder).out)]
    assert (plan["file"], plan["cells"], plan["skipped"]) == ("two.yaml", 2, {"FedPGD": "to be quick"})
    (run,) = plan["runs"]
    assert (run["run"], run["state"], run["directory"]) == ("CalFAT seed 3", "new", "runs/suites/two/calfat/seed-3")
    assert run["command"][:3] == ["calfat", "run", "tiny.yaml"]


def test_a_checked_recipe_is_printed_in_full(folder: Path, warm: WarmServer) -> None:
    shown = json.loads(warm.run("check", "tiny.yaml", "--json", cwd=folder).out)
    assert (shown["file"], shown["kind"], shown["warnings"]) == ("tiny.yaml", "recipe", [])
    assert shown["recipe"]["calfat"]["trainer"]["name"] == "calfat"
    refused = warm.run("check", "tiny.yaml", "--set", "calfat.trainer=x", "--json", cwd=folder)
    assert (refused.code, refused.out) == (2, "")


@pytest.mark.slow
def test_whoever_starts_all_parties_prints_the_server_s_results(warm: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "silo.yaml").write_text(yaml.safe_dump(SILO))
    done = warm.run("run", "silo.yaml", "--local", "--run-dir", "run", "--json", cwd=tmp_path, WITHOUT_REPORT="")
    assert done.code == 0, done.err
    assert json.loads(done.out)["results"] == json.loads((tmp_path / "run" / "results.json").read_text())
    assert "server" in done.err


# --- the page ---------------------------------------------------------------------------------------------------------


def rows(head: str) -> set[str]:
    """What stands in backquotes in the first column of the table that begins with ``head``."""
    table = PAGE.partition(f"| {head} | content |\n")[2].partition("\n\n")[0]
    names = {name for row in table.splitlines()[1:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    assert names
    return names


def test_every_column_of_rounds_csv_is_described() -> None:
    """``python tests/runs/columns.py`` writes the table."""
    assert f"{columns.BEGIN}\n{columns.table()}\n{columns.END}" in PAGE


def test_every_key_of_results_json_is_described(folder: Path) -> None:
    found = json.loads((folder / "run" / "results.json").read_text())
    assert rows("key") == {"stopped_early", *found}  # that one is only where a run stopped early
    assert rows("key of an evaluation") == {
        "interval",
        "worst_class",
        *(of.name for of in dataclasses.fields(EvaluationResult)),
    }
    assert f"| `format` | {RESULTS_FORMAT};" in PAGE
    row = PAGE.partition("| `metrics` | ")[2].partition(" |\n")[0]
    summed = {column.name for column in rounds_csv.COLUMNS if column.in_results == "sum"}
    assert set(re.findall("`([a-z_]+)`", row.partition("sums over all rounds")[2])) == summed
    assert set(found["metrics"]) <= set(re.findall("`([a-z_]+)`", row))


def test_every_file_of_a_run_is_described(folder: Path) -> None:
    described = {name.rstrip("/") for name in rows("file")}
    assert {path.name for path in (folder / "run").iterdir() if not path.name.startswith(".")} <= described
    assert [name for name in CHECKPOINTS if f"`{name}`" not in PAGE] == []
