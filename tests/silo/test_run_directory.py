"""A server across silos leaves the run directory that a simulation leaves, and calls the same loggers."""

from __future__ import annotations

import importlib.util
import json
import re
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml

from calfat_plugin.disk import write_json
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Server
from calfat_plugin.host.runtimes import CrossSiloGRPC
from calfat_plugin.host.tasks import fingerprint
from calfat_plugin.host.transports.base import Outgoing, Transport
from calfat_plugin.host.transports.message import Message, read_envelope
from calfat_plugin.observer import RunObserver
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


class ServersMessages(Transport):
    """A backend whose server answers a client's first sign of life with these messages, one after the other."""

    def __init__(self, rank: int, messages: list[Message]) -> None:
        super().__init__(rank, 3)
        self.messages = messages
        self.sent: list[Message] = []
        self.began = False

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        """Put the next message in when the client has said that it is there, or has answered the one before."""
        message = read_envelope(outgoing.data)
        is_sign_of_life = "session" in message.get_params()
        if is_sign_of_life and self.began:
            return
        self.began = True
        self.sent.append(message)
        if self.messages:
            self.inbox.put(self.messages.pop(0))


def test_a_client_says_which_run_of_the_server_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each run: a server that was started anew has another one. What a peer sends is shown as plain text."""
    silos = experiment(
        "common_args.training_type=cross_silo",
        "comm_args.backend=GRPC",
        "train_args.comm_round=3",
        "data_args.max_train_examples=40",
        "calfat.trainer={name: standard}",
    )
    server = Server(silos, silos.load_dataset(), torch.device("cpu"), RunObserver())
    joined = [(1, "3-20261128-1"), (2, "3-20261128-1"), (2, "3-20261128-2"), (3, "3-20261128-2"), (3, ""), (3, "a\nb")]
    messages = [
        Message(2, 0, 1, round=round, used=0, ticket="t", run=run, model_params=server.downlink())
        for round, run in joined
    ]
    transport = ServersMessages(1, [*messages, Message(7, 0, 1)])
    monkeypatch.setattr(CrossSiloGRPC, "open_transport", lambda runtime, rank, limit: transport)
    said: list[str] = []
    run_client(Request(silos, tmp_path / "rank-1", False, []), 1, said.append)
    of_rounds = [text for text in said if text.startswith("round ") and not text.endswith("  sent")]
    assert of_rounds == [
        "round 1/3  of the server's run 3-20261128-1",
        "round 1/3  training",
        "round 2/3  training",
        "round 2/3  of the server's run 3-20261128-2",
        "round 2/3  training",
        "round 3/3  training",
        "round 3/3  training",
        "round 3/3  of the server's run a b",
        "round 3/3  training",
    ]


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
