"""The app of `examples/flower_app`, and parties with folders of their own, over a grid in memory."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomllib
import torch
from flwr.app import Context, Message, RecordDict

from calfat_plugin.cli import flower_app
from calfat_plugin.errors import CalfatError, HostError, RunError
from calfat_plugin.federation.server import Server
from calfat_plugin.host.flower import server as flower_server
from calfat_plugin.host.flower.messages import Answer, fields_of
from calfat_plugin.host.flower.server import run_rounds
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.request import checked_experiment
from tests.flower.federation import MemoryGrid, digest, parties, trained_in_loops, write_app, written
from tests.snapshot import TextSnapshot

CHANGES = ("calfat.trainer=fedpgd", "calfat.aggregator=scaffold", "train_args.client_num_in_total=3")
CHANGED = (*CHANGES, "train_args.client_num_per_round=2")


@pytest.fixture
def app(tmp_path: Path) -> ModuleType:
    """The module of an app that was just written, and its folder in ``__file__``."""
    recipe, _ = written(tmp_path)
    write_app(tmp_path / "app", recipe, CHANGED)
    spec = importlib.util.spec_from_file_location("calfat_app", tmp_path / "app" / "calfat_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(app: ModuleType, **changes: Any) -> dict[str, Any]:
    """The run's configuration as Flower reads it from the app's project file."""
    project = tomllib.loads((Path(str(app.__file__)).parent / "pyproject.toml").read_text())
    return {**project["tool"]["flwr"]["app"]["config"], **changes}


def grid_of(app: ModuleType, nodes: dict[int, dict[str, Any]], **config: Any) -> MemoryGrid:
    grid = MemoryGrid(app.client, nodes)
    for context in grid._contexts.values():
        context.run_config = config_of(app, **config)
    return grid


def silos(folder: Path, clients: tuple[int, ...] = (2, 0, 1)) -> dict[int, dict[str, Any]]:
    """Node id to its configuration; nodes come in another order than clients."""
    return {
        10 + place: {"partition-id": client, "folder": str(folder / f"silo{place}")}
        for place, client in enumerate(clients)
    }


def run(app: ModuleType, grid: MemoryGrid, **config: Any) -> Path:
    """Call the server app as Flower does; returns the run directory."""
    config = config_of(app, **config)
    before = written_by(app)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    app.server(grid, context)
    if config["run-dir"]:
        return Path(config["run-dir"])
    return [path for path in written_by(app) if config["resume"] or path not in before][-1]


def written_by(app: ModuleType) -> list[Path]:
    """The app's run directories, in the order in which they were made."""
    return sorted(Path(config_of(app)["runs"]).glob("*"), key=lambda path: path.stat().st_ctime_ns)


def test_each_run_has_a_directory_of_its_own_and_the_unfinished_one_is_resumed(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"set": "train_args.comm_round=1"}
    first, second = (run(app, grid_of(app, silos(tmp_path), **short), **short) for _ in range(2))
    assert first != second
    assert (first / "recipe.yaml").read_text() == (second / "recipe.yaml").read_text()

    aggregate, stopped = Server.aggregate_round, {"set": "train_args.comm_round=2"}

    def stops(server: Server, round: int, *uploads: Any) -> Any:
        if round == 2:
            raise RunError("stopped")
        return aggregate(server, round, *uploads)

    monkeypatch.setattr(Server, "aggregate_round", stops)
    with pytest.raises(RunError, match="stopped"):
        run(app, grid_of(app, silos(tmp_path), **stopped), **stopped)
    monkeypatch.undo()
    (third,) = {*written_by(app)} - {first, second}
    assert not (third / "results.json").exists()
    assert run(app, grid_of(app, silos(tmp_path), **stopped), **stopped, resume=True) == third
    assert (third / "results.json").exists()
    assert len((third / "rounds.csv").read_text().splitlines()) == 3
    assert len(written_by(app)) == 3


def test_parties_give_the_bits_of_plain_loops_and_keep_what_is_theirs(app: ModuleType, tmp_path: Path) -> None:
    shorter = {"set": "train_args.comm_round=2"}
    directory = run(app, grid_of(app, silos(tmp_path), **shorter), **shorter)
    assert run(app, grid_of(app, silos(tmp_path)), resume=True) == directory  # four rounds, as the recipe says
    _, experiment = written(tmp_path, CHANGED)
    model, states = trained_in_loops(experiment)
    snapshot = load_checkpoint(directory / "checkpoints" / "last.safetensors")[0]
    assert digest(snapshot.global_state) == digest(model)
    assert dict(snapshot.client_states) == {}
    for place, client in enumerate((2, 0, 1)):
        newest = max(
            (tmp_path / f"silo{place}").glob("*/checkpoints/round-*"), key=lambda path: path.stat().st_mtime_ns
        )
        assert digest(load_checkpoint(newest)[0].client_states[client]) == digest(states[client])


def test_parties_of_one_machine_may_share_a_folder(app: ModuleType, tmp_path: Path) -> None:
    shared = {node: {**config, "folder": str(tmp_path / "shared")} for node, config in silos(tmp_path).items()}
    directory = run(app, grid_of(app, shared))
    _, experiment = written(tmp_path, CHANGED)
    snapshot = load_checkpoint(directory / "checkpoints" / "last.safetensors")[0]
    assert digest(snapshot.global_state) == digest(trained_in_loops(experiment)[0])


def test_parties_take_part_in_a_second_run_with_another_recipe(app: ModuleType, tmp_path: Path) -> None:
    first, second = ({"set": f"train_args.comm_round=2 train_args.learning_rate={rate}"} for rate in (0.05, 0.02))
    run(app, grid_of(app, silos(tmp_path), **first), **first)
    directory = run(app, grid_of(app, silos(tmp_path), **second), **second, **{"run-dir": str(tmp_path / "second")})
    _, experiment = written(tmp_path, (*CHANGED, *second["set"].split()))
    snapshot = load_checkpoint(directory / "checkpoints" / "last.safetensors")[0]
    assert digest(snapshot.global_state) == digest(trained_in_loops(experiment)[0])


def test_parties_get_a_model_once_the_round_before_is_on_disk(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it they forget what they kept before that round."""
    grid, sent = grid_of(app, silos(tmp_path)), list[tuple[int, int]]()
    directory = tmp_path / "run"
    last = directory / "checkpoints" / "last.safetensors"
    push = grid.push_messages

    def noted(messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        stored = load_checkpoint(last)[0].round if last.exists() else 0
        sent.extend((fields_of(each)["round"], stored) for each in messages if each.metadata.message_type == "train")
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", noted)
    run(app, grid, **{"run-dir": str(directory)})
    assert sent == [(round, round - 1) for round in range(1, 5) for _ in range(2)]


def test_a_simulated_node_trains_with_the_threads_and_in_the_arithmetic_of_the_server(
    app: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the recipe leaves both to the machine: Ray's processes see one core, and no GPU."""
    starts = list[Any]()

    def seen(start: bytes, message: Message) -> Answer:
        starts.append(pickle.loads(start))
        raise RunError("seen")

    monkeypatch.setattr(flower_app, "any_client", seen)
    document = read_document(str(Path(str(app.__file__)).with_name("recipe.yaml")))
    server = parties(checked_experiment(document, ["calfat.runtime.precision=bf16"]))[0]
    left = {"set": "'calfat.runtime={threads: null, precision: auto}'"}
    task = ServerTask(server, lambda record, snapshot: None)
    with pytest.raises(CalfatError, match="seen"):
        run_rounds(task, grid_of(app, {10: {}}, **left), dict.fromkeys(range(3), 10), lambda: None, states_travel=True)
    sent, threads, *_ = starts[0].args
    assert (sent.get(("calfat", "runtime", "precision")), threads) == ("bf16", torch.get_num_threads())


WRONG: dict[str, Any] = {
    "twice": lambda nodes: nodes[11].update({"partition-id": 2}),
    "no such client": lambda nodes: nodes[11].update({"partition-id": 3}),
    "no folder": lambda nodes: nodes[10].pop("folder"),
    "no number": lambda nodes: nodes[10].update({"partition-id": "first"}),
}


@pytest.mark.timeout(300)  # who lets such a node in waits for another without end
@pytest.mark.parametrize("what", WRONG)
def test_a_node_that_cannot_be_a_client_is_named(
    what: str, app: ModuleType, tmp_path: Path, snapshot: TextSnapshot
) -> None:
    nodes = silos(tmp_path)
    WRONG[what](nodes)
    with pytest.raises(HostError) as refused:
        run(app, grid_of(app, nodes))
    snapshot(str(refused.value))


def test_the_error_of_a_node_is_seen_at_the_server(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes no more than 300 characters of a party's text: the beginning of a traceback."""

    def fails(*arguments: Any) -> Answer:
        raise RuntimeError("no 5 of 7")

    monkeypatch.setattr(flower_app, "train_round", fails)
    with pytest.raises(HostError, match=r"^round 1: client \d cannot train: RuntimeError\('no 5 of 7'\) Traceback "):
        run(app, grid_of(app, silos(tmp_path)))


def test_a_set_that_cannot_be_split_is_said(app: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^set of the app's configuration, a='b: No closing quotation\.$"):
        run(app, grid_of(app, silos(tmp_path)), set="a='b")


def test_a_node_with_another_recipe_is_named(app: ModuleType, tmp_path: Path, snapshot: TextSnapshot) -> None:
    grid = grid_of(app, silos(tmp_path))
    grid._contexts[11].run_config = config_of(app, set="train_args.batch_size=7")
    with pytest.raises(HostError) as refused:
        run(app, grid)
    snapshot(str(refused.value))


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("error", [RunError("no 5 of 7"), RuntimeError("a bug of ours")], ids=["to mend", "bug"])
def test_flower_logs_a_traceback_of_bugs_alone(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """As its SuperLink's process and its simulation do, of which the latter raises another error from ours."""
    logger = logging.getLogger("flwr")
    logger.error("%s raised an exception", "ServerApp", exc_info=error)
    try:
        try:
            raise error
        except Exception as ours:
            logger.error("An exception occurred !! %s", ours)
            logger.error(traceback.format_exc())
            raise RuntimeError("An error was encountered.") from ours
    except RuntimeError as ended:
        logger.error("Simulation raised an exception", exc_info=ended)
    assert f"An exception occurred !! {error}" in caplog.messages
    if isinstance(error, RunError):
        assert caplog.messages == [
            "ServerApp raised an exception: no 5 of 7",
            "An exception occurred !! no 5 of 7",
            "Simulation raised an exception: no 5 of 7",
        ]
    else:
        assert caplog.text.count("Traceback (most recent call last)") >= 3


def test_the_server_says_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: ModuleType) -> None:
    monkeypatch.setattr(flower_server, "_REMIND", 0.0)
    document = read_document(str(Path(str(app.__file__)).with_name("recipe.yaml")))
    server: Server = parties(checked_experiment(document, ["common_args.training_type=cross_silo"]))[0]

    class EnoughError(Exception):
        pass

    def said(text: str) -> None:
        raise EnoughError(text)

    task = ServerTask(server, lambda record, snapshot: None, warn=said)
    with pytest.raises(EnoughError, match=r"^still waiting for SuperNodes of the clients .*1\.$"):
        flower_server.serve(task, grid_of(app, silos(tmp_path, (2, 0))))


def test_the_server_says_nothing_when_nobody_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: ModuleType
) -> None:
    monkeypatch.setattr(flower_server, "_REMIND", 0.0)
    document = read_document(str(Path(str(app.__file__)).with_name("recipe.yaml")))
    experiment = checked_experiment(document, ["common_args.training_type=cross_silo"])
    said: list[str] = []
    assert flower_server.RollCall(grid_of(app, silos(tmp_path)), experiment, said.append).complete() == {
        2: 10,
        0: 11,
        1: 12,
    }
    assert said == []


def test_a_node_that_goes_before_it_is_asked_is_asked_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: ModuleType
) -> None:
    """Flower then has None in the place of the message's id."""
    document = read_document(str(Path(str(app.__file__)).with_name("recipe.yaml")))
    experiment = checked_experiment(document, ["common_args.training_type=cross_silo"])
    grid = grid_of(app, silos(tmp_path))
    push, pull, gone = grid.push_messages, grid.pull_messages, [True]

    def pushed(messages: list[Message]) -> list[str | None]:
        return [None, *push(messages[1:])] if gone and gone.pop() else [*push(messages)]

    def pulled(sent: list[str]) -> list[Message]:
        assert None not in sent
        return pull(sent)

    monkeypatch.setattr(grid, "push_messages", pushed)
    monkeypatch.setattr(grid, "pull_messages", pulled)
    assert flower_server.RollCall(grid, experiment, print).complete() == {2: 10, 0: 11, 1: 12}
