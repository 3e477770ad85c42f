"""A server across silos leaves the run directory that a simulation leaves, and calls the same loggers."""

from __future__ import annotations

import importlib.util
import json
import re
from html import unescape
from pathlib import Path

import pytest
import yaml

from calfat_plugin.disk import write_json
from calfat_plugin.errors import RunError
from calfat_plugin.host.tasks import fingerprint
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.silo import UNPROTECTED
from calfat_plugin.report import write_run_report
from calfat_plugin.runs.party import PartyDirectory, run_client
from calfat_plugin.runs.request import Request, checked_experiment
from tests.report.made import experiment
from tests.report.test_loggers import scalars
from tests.silo.federation import Federation

Scalars = dict[str, list[tuple[int, float]]]


def files(directory: Path) -> set[str]:
    """Relative paths below a run directory; the names of event files differ in time and process."""
    found = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return {re.sub(r"tfevents\..*", "tfevents", path) for path in found}


def headings(report: Path) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", report.read_text(), re.DOTALL)


def comparable(directory: Path) -> Scalars:
    """Tag to (step, value), without those that measure time and memory."""
    found = scalars(directory / "tensorboard")
    return {tag: values for tag, values in found.items() if "seconds" not in tag and "memory" not in tag}


def assert_profiles(federation: Federation) -> None:
    """Every party says where its own time went: the server without training, each client without aggregation."""
    outermost = {}
    for rank in range(3):
        parts = json.loads((federation.directory(rank) / "profile.json").read_text())["parts"]
        outermost[rank] = {span["path"][0] for part in parts for span in part["spans"] if len(span["path"]) == 1}
        names = ["round 1", "round 2", *(["final evaluation"] if rank == 0 else [])]
        assert [part["name"] for part in parts] == names
    assert outermost[0] == {"aggregation", "evaluation", "checkpoint", "loggers"}
    assert outermost[1] == outermost[2] == {"training", "checkpoint"}
    assert "a round of calfat, mean of 2 rounds" in federation.output(0)
    path = federation.directory(1) / "profile.json"
    assert f"where the time went: {path}\nthe run is over\n" in federation.output(1)
    assert "where the time went:\n| a round of calfat, mean of 2 rounds" in federation.log(1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_a_server_writes_and_logs_what_a_simulation_does(tmp_path: Path) -> None:
    with Federation(tmp_path, train_args={"comm_round": 2}) as federation:
        federation.content["calfat"]["loggers"] = ["tensorboard"]
        federation.recipe.write_text(yaml.safe_dump(federation.content))
        federation.reports = False  # the two pages are written and compared below
        federation.options = ("--profile",)
        federation.start_all()
        federation.simulate(None, "--profile")
        federation.finish()
    across, simulated = federation.directory(0), tmp_path / "simulated"
    assert files(across) == files(simulated) - {"partition.json"}  # class counts stay with the clients
    logged = comparable(across)
    assert logged == comparable(simulated)
    assert [step for step, _ in logged["accuracy/natural"]] == [1, 2]
    assert not list(federation.directory(1).rglob("*tfevents*"))
    assert_profiles(federation)
    assert f"warning: {UNPROTECTED}" in federation.output(0)
    assert headings(write_run_report(across)) == headings(write_run_report(simulated))
    assert UNPROTECTED in unescape((across / "report.html").read_text())
    assert UNPROTECTED not in unescape((simulated / "report.html").read_text())


@pytest.mark.parametrize(
    ("schedule", "further"),
    [
        ("constant", "To go further, resume all parties with --set train_args.comm_round=13."),
        ("cosine", "It cannot go further. A cosine schedule ends with the rounds, "),
    ],
)
def test_a_client_that_is_finished_is_told_how_to_go_further_if_it_can(
    tmp_path: Path, schedule: str, further: str
) -> None:
    schedules = (f"train_args.lr_schedule={schedule}", "train_args.comm_round=3")
    silos = experiment("common_args.training_type=cross_silo", "comm_args.backend=GRPC", *schedules)
    directory = PartyDirectory.create(silos, tmp_path / "rank-1")
    write_json(directory.results, {"rounds": 3})
    said: list[str] = []
    run_client(Request(silos, directory.path, True, []), 1, said.append)
    (text,) = said
    assert text.startswith(f"client 0 of made is finished after 3 rounds. {further}")


def test_a_client_is_resumed_after_its_last_round(tmp_path: Path) -> None:
    """As the server may be, which was stopped in its final evaluation."""
    silos = experiment("common_args.training_type=cross_silo", "comm_args.backend=GRPC")
    request = Request(silos, None, True, [])
    with pytest.raises(RunError, match=r"\(none at all\)"):
        PartyDirectory.open(request, tmp_path)
    first, last = (tmp_path / name for name in ("0-20261121-120000", "0-20261121-130000"))
    for path in (first, last):
        directory = PartyDirectory.create(silos, path)
        write_json(directory.results, {"rounds": silos.num_rounds})
    assert PartyDirectory.open(request, tmp_path).path == last
    PartyDirectory(first).results.unlink()
    assert PartyDirectory.open(request, tmp_path).path == first
    # One that downloads its data runs the same as the others.
    recipe = read_document("recipes/calfat_cifar10.yaml")
    party, downloading = checked_experiment(recipe), checked_experiment(recipe, download=True)
    assert (
        fingerprint(party) == fingerprint(downloading) != fingerprint(checked_experiment(recipe, seed=party.seed + 1))
    )
