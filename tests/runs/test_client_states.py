"""What clients keep, a file each: a round touches those of its own clients, and a kill leaves the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs import checkpoints
from calfat_plugin.runs.checkpoints import (
    ClientStateFile,
    ClientStateFiles,
    ClientStates,
    load_checkpoint,
    named_files,
    save_checkpoint,
)
from calfat_plugin.runs.party import _States
from calfat_plugin.tensor_files import write_tensors
from tests.runs.processes import WarmServer, sabotage
from tests.runs.remains import everything
from tests.runs.test_refusals import contents

AGAIN = "Restore it from a copy, or start the run again in another directory."
SCAFFOLD = ("--set", "calfat.aggregator=scaffold", "--set", "train_args.client_num_per_round=3")
RUN = ("run", "tiny.yaml", *SCAFFOLD, "--set", "train_args.comm_round=6", "--run-dir")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"scaffold/c/w": torch.full((2, 3), value), "personal/n": torch.tensor(7)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def store(tmp_path: Path, round: int = 1) -> ClientStates:
    return ClientStates(tmp_path / "clients", {}, round)


def close_round(states: ClientStates, tmp_path: Path, round: int, *also: str) -> None:
    """As the writer of a run does."""
    states.take_written()
    for name in (*also, "last"):
        save_checkpoint(tmp_path / f"{name}.safetensors", Snapshot(round, {}, client_states=states), {})
    states.saved((*also, "last"), dict(states.named))
    states.round = round + 1


def test_states_come_back_with_the_bits_they_had(tmp_path: Path) -> None:
    states = store(tmp_path)
    transposed = torch.arange(6.0).reshape(2, 3).t()
    states[3] = {"shared": transposed, "same memory": transposed, "bf16": torch.ones(2, dtype=torch.bfloat16)}
    states[11] = state(0.1)
    assert (sorted(states), len(states), 3 in states, 4 in states, states.get(4)) == ([3, 11], 2, True, False, None)
    assert torch.equal(states[3]["same memory"], transposed)
    assert states[3]["bf16"].dtype is torch.bfloat16
    close_round(states, tmp_path, 1)
    loaded, _ = load_checkpoint(tmp_path / "last.safetensors")
    assert sorted(loaded.client_states) == [3, 11]
    assert all(torch.equal(tensor, state(0.1)[name]) for name, tensor in loaded.client_states[11].items())


def test_a_client_that_keeps_nothing_has_no_file(tmp_path: Path) -> None:
    states = store(tmp_path)
    states[3] = {}
    assert (list(states), (tmp_path / "clients").exists()) == ([], False)
    states[3] = state(1)
    states[3] = {}
    assert list(states) == []
    close_round(states, tmp_path, 1)
    assert names(tmp_path / "clients") == []


def test_files_stay_as_long_as_a_checkpoint_names_them(tmp_path: Path) -> None:
    states, folder = store(tmp_path), tmp_path / "clients"
    states[0], states[1] = state(0), state(1)
    close_round(states, tmp_path, 1, "best-natural")
    states[1] = state(2)
    assert names(folder) == [f"client-{end}.safetensors" for end in ("0-round-1", "1-round-1", "1-round-2")]
    close_round(states, tmp_path, 2)
    states[1] = state(3)
    close_round(states, tmp_path, 3)
    assert names(folder) == [f"client-{end}.safetensors" for end in ("0-round-1", "1-round-1", "1-round-3")]
    best, _ = load_checkpoint(tmp_path / "best-natural.safetensors")
    assert best.client_states[1]["scaffold/c/w"].max() == 1
    close_round(states, tmp_path, 4, "best-natural")
    assert names(folder) == [f"client-{end}.safetensors" for end in ("0-round-1", "1-round-3")]


def test_what_a_killed_process_left_is_removed_and_no_other_file(tmp_path: Path) -> None:
    states, folder = store(tmp_path), tmp_path / "clients"
    states[0] = state(0)
    close_round(states, tmp_path, 1)
    states[0], states[5] = state(1), state(5)  # killed here
    (folder / "notes.txt").write_text("mine")
    again = ClientStates(folder, {"last": named_files(tmp_path / "last.safetensors")}, 2)
    assert names(folder) == ["client-0-round-1.safetensors", "notes.txt"]
    assert list(again) == [0]
    assert again[0]["scaffold/c/w"].max() == 0


def test_a_round_touches_the_states_of_its_own_clients_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = store(tmp_path)
    for client in range(100):
        states[client] = state(client)
    close_round(states, tmp_path, 1)
    touched: list[str] = []

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        def noted(path: Path, *rest: object) -> object:
            touched.extend([path.name] if path.name.startswith("client-") else [])
            return function(path, *rest)

        return noted

    for name in ("read_tensors", "write_tensors"):
        monkeypatch.setattr(checkpoints, name, noting(getattr(checkpoints, name)))
    again = ClientStates(tmp_path / "clients", {"last": named_files(tmp_path / "last.safetensors")}, 2)
    for client in (7, 40):
        again[client] = {name: tensor + 1 for name, tensor in again[client].items()}
    close_round(again, tmp_path, 2)
    assert touched == [
        f"client-{client}-round-{round}.safetensors" for client, round in ((7, 1), (7, 2), (40, 1), (40, 2))
    ]
    assert len(load_checkpoint(tmp_path / "last.safetensors")[0].client_states) == 100


def test_the_states_of_a_round_under_way_stay_when_the_one_before_is_on_disk(tmp_path: Path) -> None:
    states = store(tmp_path)
    states[0] = state(0)
    named = dict(states.named)
    save_checkpoint(tmp_path / "last.safetensors", Snapshot(1, {}, client_states=states), {})
    states.round = 2
    states[0], states[5] = state(1), state(5)
    states.saved(["last"], named)
    assert names(tmp_path / "clients") == [
        f"client-{end}.safetensors" for end in ("0-round-1", "0-round-2", "5-round-2")
    ]
    assert states[0]["scaffold/c/w"].max() == 1


def lost(path: Path) -> str:
    path.unlink()
    return f"{path}: the state of client 4 cannot be read (No such file or directory: {path}). {AGAIN}"


def flipped(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return f"{path}: the file is damaged: its content is not what was written (SHA-256). {AGAIN}"


def exchanged(path: Path) -> str:
    path.write_bytes(path.with_name("client-0-round-1.safetensors").read_bytes())
    return f"{path}: not the file that the checkpoint names (SHA-256). {AGAIN}"


def foreign(path: Path) -> str:
    save_file({"w": torch.zeros(1)}, path)
    return f"{path}: the state of client 4 cannot be read ('sha256'). {AGAIN}"


@pytest.mark.parametrize("damage", [lost, flipped, exchanged, foreign])
def test_a_damaged_state_is_named(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    states = store(tmp_path)
    states[0], states[4] = state(0), state(4)
    close_round(states, tmp_path, 1)
    expected = damage(tmp_path / "clients" / "client-4-round-1.safetensors")
    loaded, _ = load_checkpoint(tmp_path / "last.safetensors")
    assert loaded.client_states[0]["personal/n"] == 7
    with pytest.raises(RunError) as raised:
        loaded.client_states[4]
    assert str(raised.value) == expected


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "clients").write_text("a file")
    with pytest.raises(RunError) as raised:
        store(tmp_path)[0] = state(0)
    path = tmp_path / "clients" / "client-0-round-1.safetensors"
    assert str(raised.value) == f"{path}: cannot be written (File exists). Make room, or choose another --run-dir."


def test_a_checkpoint_copied_away_still_has_its_model(tmp_path: Path) -> None:
    states = store(tmp_path)
    states[0] = state(0)
    save_checkpoint(tmp_path / "last.safetensors", Snapshot(1, {"w": torch.ones(2)}, client_states=states), {})
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(tmp_path / "last.safetensors", tmp_path / "elsewhere")
    loaded, _ = load_checkpoint(Path(copy))
    assert torch.equal(loaded.global_state["w"], torch.ones(2))
    assert loaded.client_states.keys() == {0}


def test_named_files_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "best-natural.safetensors"
    assert named_files(path) == {}
    path.write_bytes(b"broken")
    assert named_files(path) == {}
    save_checkpoint(path, Snapshot(1, {}, client_states={3: state(1)}), {})
    assert named_files(path) == {}
    files = ClientStateFiles(tmp_path, {3: ClientStateFile(9, "ab")})
    save_checkpoint(path, Snapshot(1, {}, client_states=files), {})
    assert named_files(path) == {3: (9, "ab")}


@pytest.fixture(scope="module")
def whole(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of SCAFFOLD, three of five clients a round."""
    from tests.runs.processes import RECIPE

    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(RECIPE)
    done = warm.run(*RUN, "run", cwd=folder)
    assert (done.code, done.err) == (0, "")
    return folder / "run"


@pytest.mark.parametrize(
    ("at", "round"),
    [("training", 4), ("state", 1), ("state", 5), ("row", 5), ("written", 3), ("best", 1), ("last", 4), ("last", 6)],
)
def test_killed_anywhere_and_resumed_leaves_behind_what_an_uninterrupted_run_does(
    warm: WarmServer, whole: Path, recipe: Path, at: str, round: int
) -> None:
    """Down to the bytes of every client's file, and without any other file."""
    assert warm.run(*RUN, "run", cwd=recipe.parent, **sabotage(at, round)).code == -9
    left = names(recipe.parent / "run" / "checkpoints" / "clients")
    written = any(name.endswith(f"-round-{round}.safetensors") for name in left)
    assert written == (at != "training")  # once the server has used the updates
    resumed = warm.run(*RUN, "run", "--resume", cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    assert everything(recipe.parent / "run") == everything(whole)


def test_a_missing_state_is_found_before_anything_changes(warm: WarmServer, recipe: Path) -> None:
    assert warm.run(*RUN, "run", cwd=recipe.parent, **sabotage("row", 5)).code == -9
    run = recipe.parent / "run"
    snapshot, _ = load_checkpoint(run / "checkpoints" / "last.safetensors")
    assert isinstance(snapshot.client_states, ClientStateFiles)
    client, file = next(iter(snapshot.client_states.named.items()))
    gone = Path("run") / "checkpoints" / "clients" / f"client-{client}-round-{file.round}.safetensors"
    (recipe.parent / gone).unlink()
    before = contents(run)
    done = warm.run(*RUN, "run", "--resume", cwd=recipe.parent)
    assert (done.code, done.err) == (2, f"error: {gone}: no such file, but the checkpoint names it. {AGAIN}\n")
    assert contents(run) == before


@pytest.mark.parametrize("round", [2, 6])
def test_killed_with_the_round_before_not_on_disk(warm: WarmServer, whole: Path, recipe: Path, round: int) -> None:
    """Both are made again, to the same bits."""
    assert warm.run(*RUN, "run", cwd=recipe.parent, **sabotage("behind", round)).code == -9
    last = recipe.parent / "run" / "checkpoints" / "last.safetensors"
    assert (load_checkpoint(last)[0].round if last.exists() else 0) == round - 2
    assert len((recipe.parent / "run" / "rounds.csv").read_text().splitlines()) == 1 + round - 1
    resumed = warm.run(*RUN, "run", "--resume", cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    assert everything(recipe.parent / "run") == everything(whole)


def test_a_party_keeps_two_rounds_and_nothing_of_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / "round-5.safetensors.tmp").touch()  # it was killed while it wrote this
    states = _States(tmp_path, 3, pytest.fail)
    states.keep(6, state(6), used=0)
    for round, used in ((7, 6), (8, 7)):
        states.keep(round, state(round), used)
    assert names(tmp_path) == ["round-7.safetensors", "round-8.safetensors"]
    states.keep(9, state(9), used=7)
    assert names(tmp_path) == ["round-7.safetensors", "round-9.safetensors"]
    assert torch.equal(states.after(7)["scaffold/c/w"], state(7)["scaffold/c/w"])


def test_a_party_does_not_take_what_another_one_keeps(tmp_path: Path) -> None:
    """As when it is started with the run directory of another rank, which has the same recipe."""
    (tmp_path / "round-5.safetensors").write_text("damaged")  # and not needed
    _States(tmp_path, 0, pytest.fail).keep(6, state(6), used=5)
    before = names(tmp_path)
    with pytest.raises(RunError, match=r"round-6\.safetensors: is of client 0, and this is client 1\. Give each"):
        _States(tmp_path, 1, pytest.fail)
    assert names(tmp_path) == before
    assert torch.equal(_States(tmp_path, 0, pytest.fail).after(6)["scaffold/c/w"], state(6)["scaffold/c/w"])


def test_a_party_does_not_take_what_it_kept_in_another_run(tmp_path: Path) -> None:
    """Nor what it kept after another round, under the name of one that the server asks for."""
    _States(tmp_path, 0, pytest.fail, "one").keep(6, state(6), used=0)
    assert torch.equal(_States(tmp_path, 0, pytest.fail, "one").after(6)["scaffold/c/w"], state(6)["scaffold/c/w"])
    for other in ("another", None):
        with pytest.raises(RunError, match=r"round-6\.safetensors: is of another run, or of round 6"):
            _States(tmp_path, 0, pytest.fail, other)
    (tmp_path / "round-6.safetensors").rename(tmp_path / "round-7.safetensors")
    with pytest.raises(RunError, match=r"round-7\.safetensors: is of another run, or of round 6"):
        _States(tmp_path, 0, pytest.fail, "one")


def test_a_file_of_another_run_is_found_before_a_client_trains(tmp_path: Path) -> None:
    """It says itself that it is not the one which the checkpoint names, so no tensor need be read."""
    states = ClientStates(tmp_path / "clients", {}, 1)
    (tmp_path / "clients").mkdir()
    states[0] = state(1)
    states.check_complete()
    write_tensors(states.path(0, 1), state(2), {"client": 0, "round": 1})
    with pytest.raises(RunError, match=r"client-0-round-1\.safetensors: not the file that the checkpoint names"):
        states.check_complete()


def test_a_party_says_that_what_it_kept_is_gone(tmp_path: Path) -> None:
    """As when it is started again without --resume; not where its method keeps nothing."""
    said: list[str] = []
    states = _States(tmp_path, 0, said.append)
    assert states.after(4) == {}
    states.keep(5, {}, used=4)
    assert said == []
    states.keep(6, state(6), used=4)
    states.keep(7, state(7), used=6)
    assert said == [
        f"round 6 was trained without what this client kept after round 4: it is not in {tmp_path}. To go on with it, "
        "start a client again with --resume."
    ]
