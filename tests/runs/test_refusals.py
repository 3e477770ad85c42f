"""What cannot be run or resumed is refused with the reason, and the run directory stays as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calfat_plugin.cli.party import ResumeHint
from calfat_plugin.errors import RunError
from calfat_plugin.results import RoundRecord
from calfat_plugin.rounds import RoundsFile
from calfat_plugin.rounds_csv import RoundTables
from calfat_plugin.runs.directory import RunDirectory
from tests.cli.runner import Ended
from tests.report.made import experiment, made_run
from tests.runs.processes import RECIPE, TIMEOUT, WarmServer, sabotage
from tests.snapshot import TextSnapshot

RUN = ("run", "tiny.yaml", "--set", "train_args.comm_round=3", "--run-dir", "run")


@pytest.fixture(scope="module")
def stopped(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run that was stopped in its third round."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "tiny.yaml").write_text(RECIPE)
    assert warm.run(*RUN, cwd=folder, **sabotage("training", 3, "SIGTERM")).code == 130
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy = tmp_path / "copy"
    shutil.copytree(stopped, copy)
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "log.txt"}


def refused(warm: WarmServer, folder: Path, *arguments: str) -> str:
    """The error of a command that must be refused and must change nothing."""
    before = contents(folder)
    done: Ended = warm.run(*arguments, cwd=folder)
    assert (done.code, done.out) == (2, "")
    assert contents(folder) == before
    return done.err


def test_nothing_to_resume(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    snapshot(refused(warm, folder, "run", "tiny.yaml", "--resume"))
    snapshot(refused(warm, folder, "run", "tiny.yaml", "--resume", "--run-dir", "elsewhere"))


def test_a_recipe_as_run_that_somebody_edited(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    recipe = folder / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("learning_rate: 0.05", "learning_rate: 0.1"))
    snapshot(refused(warm, folder, "run", "run/recipe.yaml", "--resume", "--run-dir", "run"))
    assert "was started with" not in refused(warm, folder, "run", "tiny.yaml", "--resume", "--run-dir", "run")


def test_only_finished_runs_to_resume(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    assert warm.run(*RUN, "--resume", cwd=folder).code == 0
    (folder / "run" / "report.html").touch()
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "run").rename(folder / "runs" / "tiny" / "0-20261121-120000")
    snapshot(refused(warm, folder, *RUN[:-2], "--resume"))


def test_another_recipe(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    changed = (*RUN, "--resume", "--set", "train_args.learning_rate=0.1", "--set", "calfat.threat.eps=0.08")
    snapshot(refused(warm, folder, *changed))
    own = warm.run("run", "run/recipe.yaml", "--resume", "--run-dir", "run", cwd=folder)
    assert (own.code, own.err) == (0, "")
    assert own.out.startswith("tiny: resuming at round 3 of 3 rounds in run\n")
    assert json.loads((folder / "run" / "results.json").read_text())["recipe"] == "tiny"


@pytest.mark.parametrize("key", ["class_counts", "dataset_sha256", "partition_sha256"])
def test_other_data_under_the_same_recipe(warm: WarmServer, folder: Path, key: str) -> None:
    """A data set of the same name may hold other images on another machine, or a plugin may split it another way."""
    path = folder / "run" / "partition.json"
    content = json.loads(path.read_text())
    now = content[key]
    if key == "class_counts":
        now = content[key][2][7]
        content[key][2][7] += 1
        then: object = now + 1
    else:
        then = content[key] = "0" * 64
    path.write_text(json.dumps(content))
    assert refused(warm, folder, *RUN, "--resume") == (
        f"error: run: the data are not those this run was started with. {key} in partition.json: {then} when started, "
        f"{now} now. Resume with the same data and partition, or start again without --resume.\n"
    )


@pytest.mark.parametrize("left", ["checkpoints", "rounds.jsonl", "rounds.csv", "results.json"])
def test_what_is_left_of_a_run_is_not_taken_for_the_next_one(warm: WarmServer, folder: Path, left: str) -> None:
    """Without its recipe nobody knows what it is: a new run would go on from its model, or replace what it measured."""
    (folder / "run" / "results.json").write_text("{}")
    for path in (folder / "run").iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    what = "checkpoints/last.safetensors" if left == "checkpoints" else left
    assert refused(warm, folder, *RUN, "--set", "calfat.trainer=fedtrades") == (
        f"error: run: there is {what} of another run in this directory, and no recipe.yaml that says which. Choose "
        "another --run-dir, or remove it.\n"
    )


class Late(RunDirectory):
    """A directory in which another process was a moment earlier."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        with super().locked():
            self.recipe.write_text("of another process")
            yield


def test_of_two_that_make_a_directory_at_once_the_later_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is a run in this directory already"):
        Late.create(experiment(), tmp_path)
    assert (tmp_path / "recipe.yaml").read_text() == "of another process"


def test_what_another_process_writes_is_not_discarded(tmp_path: Path) -> None:
    made = RunDirectory.create(experiment(), tmp_path / "run")
    hint = ResumeHint([], resumed=False)
    hint.directory = made
    before = contents(tmp_path)
    with RunDirectory(made.path).locked():
        with pytest.raises(RunError, match="another process is writing this run"), made.locked():
            pass
        assert hint.after_error() == ""
        assert contents(tmp_path) == before
    made.last_checkpoint.touch()  # now that one has ended, and a round is finished
    assert hint.after_error() == ""
    made.last_checkpoint.unlink()
    assert contents(tmp_path) == before
    hint.after_error()
    assert not made.path.exists()


def test_a_run_that_a_process_of_this_one_writes_is_left_to_that(tmp_path: Path) -> None:
    """A server in a process of its own removes its directory itself."""
    made = RunDirectory.create(experiment(), tmp_path / "run")
    hint = ResumeHint(["calfat", "run"], resumed=False)
    hint.directory = made
    hint.is_ours = False
    before = contents(tmp_path)
    assert hint.after_stop() == "stopped. No round was finished, so nothing is kept."
    assert hint.after_error() == ""
    assert contents(tmp_path) == before
    made.last_checkpoint.touch()
    assert "Resume with:\n  calfat run --resume" in hint.after_stop()


def test_another_number_of_rounds_of_a_cosine(tmp_path: Path, snapshot: TextSnapshot) -> None:
    """Rounds of a constant rate may be added; these would have had other learning rates."""
    cosine = "train_args.lr_schedule=cosine"
    run = RunDirectory(made_run(tmp_path / "run", cosine))
    run.check_same(experiment(cosine))
    with snapshot.raises(RunError):
        run.check_same(experiment(cosine, "train_args.comm_round=9"))
    for schedule in ("train_args.lr_schedule=constant", "train_args.warmup_rounds=2"):
        RunDirectory(made_run(tmp_path / schedule, schedule)).check_same(
            experiment(schedule, "train_args.comm_round=9")
        )


@pytest.mark.parametrize(
    ("setting", "rounds", "refused"),
    [
        ("threat.inner={name: atas, reset: 2}", 4, True),
        ("threat.inner={name: atas, reset: 2}", 3, False),
        ("clients=[{ids: 0, threat: {inner: {name: atas, reset: 4}}}]", 4, True),
        ("threat.inner=free", 4, False),
        ("threat.by_class={}", 4, True),
        ("threat.by_class={warmup: 0}", 4, False),
        ("clients=[{ids: 0, threat: {by_class: {alpha: 0, warmup: 0.5}}}]", 4, True),
    ],
)
def test_more_rounds_than_those_that_training_counted_on(
    setting: str, rounds: int, refused: bool, tmp_path: Path
) -> None:
    """A warm-up of eps by class is a share of them, and in the last one alone ATAS goes on with what it has:
    so a run of more rounds is another one."""
    overrides = (f"calfat.{setting}", f"train_args.comm_round={rounds}")
    run = RunDirectory(made_run(tmp_path / "run", *overrides))
    run.check_same(experiment(*overrides))
    longer = experiment(*overrides, "train_args.comm_round=9")
    if not refused:
        return run.check_same(longer)
    with pytest.raises(RunError, match=f"comm_round: {rounds} when started, 9 now. .* a share of them, and atas"):
        run.check_same(longer)


@pytest.mark.parametrize(
    "change",
    ["calfat.runtime.threads=2", "calfat.runtime.precision=bf16", "train_args.comm_round=1", "data_args.dataset=svhn"],
    ids=["threads", "arithmetic", "fewer rounds than are done", "data set"],
)
def test_another_setting(warm: WarmServer, folder: Path, snapshot: TextSnapshot, change: str) -> None:
    snapshot(refused(warm, folder, *RUN, "--resume", "--set", change))


def test_another_machine_is_welcome(warm: WarmServer, folder: Path) -> None:
    moved = ("--set", "device_args.gpu_id=1", "--set", "data_args.data_cache_dir=elsewhere")
    assert warm.run(*RUN, "--resume", *moved, cwd=folder).code == 0
    assert "data_cache_dir: elsewhere" in (folder / "run" / "recipe.yaml").read_text()


def test_a_finished_run(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    assert warm.run(*RUN, "--resume", cwd=folder).code == 0
    snapshot(refused(warm, folder, *RUN, "--resume"))


def test_a_finished_run_that_cannot_go_further(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    """No advice that would then be refused."""
    cosine = (*RUN[:3], "train_args.comm_round=1", "--set", "train_args.lr_schedule=cosine", "--run-dir", "other")
    assert warm.run(*cosine, cwd=folder, WITHOUT_REPORT="").code == 0
    said = refused(warm, folder, *cosine, "--resume")
    assert "--set" not in said
    snapshot(said)


def test_a_recipe_yaml_changed_by_hand(warm: WarmServer, folder: Path) -> None:
    (folder / "run" / "recipe.yaml").write_text("calfat: [")
    error = refused(warm, folder, *RUN, "--resume")
    assert error.startswith("error: run: cannot be resumed: run/recipe.yaml:1: not valid YAML: ")


def test_places_where_no_run_directory_can_be(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    (folder / "runs").write_text("a file")
    error = refused(warm, folder, "run", "tiny.yaml")
    assert error.startswith("error: runs/tiny/0-")
    assert error.endswith(": the run directory cannot be created (Not a directory).\n")
    snapshot(refused(warm, folder, "run", "tiny.yaml", "--run-dir", "runs/here"))


def test_a_start_that_fails_leaves_nothing_behind(warm: WarmServer, folder: Path) -> None:
    for arguments in ((), ("--run-dir", "new/folder")):
        missing = ("--set", "data_args.dataset=cifar10", "--set", "data_args.data_cache_dir=nowhere")
        assert "nowhere" in refused(warm, folder, "run", "tiny.yaml", *missing, *arguments)
    assert sorted(path.name for path in folder.iterdir()) == ["run", "tiny.yaml"]


def test_a_run_that_another_process_writes(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    running = warm.start(*RUN, "--resume", cwd=folder, **sabotage("training", 3, "SIGSTOP"))
    try:
        deadline = time.monotonic() + TIMEOUT
        while not _stopped(running.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        snapshot(warm.run(*RUN, "--resume", cwd=folder).err)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    done = running.wait()
    assert (done.code, done.err) == (0, "")


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_full_disk_is_reported_and_no_bug() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    record = RoundRecord(1, (0,), {}, {0: 1.0}, {0: 1.0}, 0.0, {}, 1.0, 0, 0)
    with pytest.raises(RunError) as raised:
        RoundsFile(full, RoundTables(full.parent, ["natural"], 1)).append(record)
    told = "/dev/full: cannot be written (No space left on device). Make room, or choose another --run-dir."
    assert str(raised.value) == told
