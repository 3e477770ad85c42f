"""What the doors say to recipes and options that cannot be run across silos."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path

import pytest

from calfat_plugin.cli import party
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.silo import UNPROTECTED
from calfat_plugin.results import RoundRecord
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import checked_experiment
from tests.cli.runner import calfat
from tests.silo.federation import Federation
from tests.snapshot import TextSnapshot

OPEN = "fl.example.org:8890, a.example.org:8890, b.example.org:8890"


@pytest.mark.parametrize(
    "changes",
    [
        [f"calfat.silo.parties=[{OPEN}]"],
        ["calfat.silo.bind=0.0.0.0"],
        ["train_args.federated_optimizer=FedProx"],
        ["comm_args.backend=NCCL"],
        ["comm_args.backend=sp"],
        ["comm_args.backend=MQTT_S3", "calfat.silo.mqtt.broker='mq.example.org:1883'"],
        ["comm_args.backend=MQTT_S3", "calfat.silo.s3.endpoint='http://s3.example.org'"],
        ["calfat.silo.mqtt.broker=mq.example.org"],
        ["calfat.silo.mqtt.run=a/b"],
        ["calfat.silo.mqtt.username=me"],
        ["calfat.silo.s3.endpoint='https://me:secret@s3.example.org'"],
        ["calfat.silo.s3.endpoint=s3.example.org"],
        ["calfat.silo.s3.bucket=''"],
        ["calfat.silo.parties=[127.0.0.1:1, 127.0.0.1:2]"],
        ["calfat.silo.parties=[127.0.0.1:1, 127.0.0.1:2, 127.0.0.1]"],
        ["calfat.silo.parties=[127.0.0.1:1, 127.0.0.1:2, 127.0.0.1:2]"],
        ["calfat.silo.min_clients=3"],
        ["calfat.silo.tls={ca: ca.pem, cert: c.pem}"],
        ["calfat.silo.s3.endpoint='http://[::1:9000'"],
    ],
)
def test_check_refuses_what_cannot_run(tmp_path: Path, changes: list[str], snapshot: TextSnapshot) -> None:
    words = [word for change in changes for word in ("--set", change)]
    done = calfat("check", Federation(tmp_path).recipe, *words)
    assert done.code == 2
    snapshot(done.out + done.err)


MQTT = "comm_args.backend=MQTT_S3"


@pytest.mark.parametrize(
    "changes",
    [
        [f"calfat.silo.parties=[{OPEN}]", "calfat.silo.insecure=true"],
        ["calfat.silo.parties=['[::1]:8890', 'localhost:8891', '127.0.0.2:8892']"],
        [MQTT],
        [MQTT, "calfat.silo.mqtt={broker: 'mq.example.org:8883', tls: true}", "calfat.silo.s3={endpoint: null}"],
        [MQTT, "calfat.silo.mqtt.broker='mq.example.org:8883'", "calfat.silo.tls={ca: a, cert: b, key: c}"],
        [MQTT, "calfat.silo.mqtt.broker='mq:1883'", "calfat.silo.s3.endpoint='http://s3'", "calfat.silo.insecure=true"],
    ],
)
def test_what_is_safe_or_said_to_be_is_taken(tmp_path: Path, changes: list[str]) -> None:
    words = [word for change in changes for word in ("--set", change)]
    done = calfat("check", Federation(tmp_path).recipe, *words)
    assert done.code == 0, done


def test_passwords_need_access_rules_and_the_server_says_which(tmp_path: Path, snapshot: TextSnapshot) -> None:
    """A broker that only checks them lets one party write under another's name; no run can see its rules."""
    document = read_document(Federation(tmp_path).recipe)
    broker = "broker: 'mq.example.org:8883', run: wards, tls: true"
    passwords = f"calfat.silo.mqtt={{{broker}, username: 'party-{{rank}}', password_file: secret.txt}}"
    runtime = runtime_of(checked_experiment(document, [MQTT, passwords]))
    (warning,) = runtime.security_warnings(0)
    snapshot(warning)
    assert list(runtime.security_warnings(1)) == []
    nobody = runtime_of(checked_experiment(document, [MQTT, f"calfat.silo.mqtt={{{broker}}}"]))
    assert list(nobody.security_warnings(0)) == [UNPROTECTED]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--set train_args.client_num_per_round=1",
        "--role client --rank 3",
        "--role server --set calfat.silo.parties=null",
        "--local --set common_args.training_type=simulation --set comm_args.backend=sp",
        "--rank 1 --set comm_args.backend=MPI",
    ],
)
def test_run_says_which_party_to_be(tmp_path: Path, options: str, snapshot: TextSnapshot) -> None:
    done = calfat("run", Federation(tmp_path).recipe, *options.split())
    assert done.code == 2
    snapshot(done.out + done.err)


# --- a new run beside one that could go on ----------------------------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of the recipe that was killed after its second round of three."""
    monkeypatch.chdir(tmp_path)
    experiment = checked_experiment(read_document(Federation(tmp_path).recipe))
    run = RunDirectory.create(experiment, Path("runs/recipe/3-20260101-120000"))
    file = run.rounds_file(experiment)
    for number in (1, 2):
        file.append(RoundRecord(number, (0, 1), {}, {}, {}, 0.0, {}, 1.0, 0, 0))
    run.last_checkpoint.touch()
    return run


def warned(*words: str) -> str:
    return calfat("run", "recipe.yaml", *words).err


def test_a_server_that_begins_anew_names_the_run_that_it_leaves_behind(
    unfinished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []
    run = importlib.import_module("calfat_plugin.cli.run")
    monkeypatch.setattr(run, "_run", lambda request, directory, plain, hint: begun.append(directory.path))
    monkeypatch.setattr(party, "run_all", lambda runtime, words, directory, resume: begun.append(directory) or 1)
    said = (
        "warning: runs/recipe/3-20260101-120000: there is an unfinished run of this recipe and seed, with 2 of 3 "
        "rounds done. This is a new one, which begins with the first round. To continue that one instead: "
    )
    how = "run recipe.yaml --role server --resume --run-dir runs/recipe/3-20260101-120000\n"
    served = warned("--role", "server")
    assert said in served
    assert how in served
    assert said in warned("--local")
    assert len(begun) == 2
    assert unfinished.path not in begun
    for words in (["--seed", "4"], ["--set", "train_args.learning_rate=0.1"], ["--run-dir", "elsewhere"], ["--resume"]):
        assert "there is an unfinished run" not in warned("--role", "server", *words)


@pytest.mark.parametrize("change", ["finished", "busy", "no round"])
def test_only_a_run_that_can_be_resumed_is_named(unfinished: RunDirectory, change: str) -> None:
    experiment = checked_experiment(read_document("recipe.yaml"))
    assert RunDirectory.left_behind(experiment) is not None
    with ExitStack() as stack:
        if change == "finished":
            unfinished.results.touch()
        elif change == "no round":
            unfinished.last_checkpoint.unlink()
        else:
            stack.enter_context(unfinished.locked())
        assert RunDirectory.left_behind(experiment) is None
