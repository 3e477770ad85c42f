"""What the doors say to recipes and options that cannot be run across silos."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from calfat_plugin.cli.main import main
from tests.silo.federation import Federation

OPEN = "fl.example.org:8890, a.example.org:8890, b.example.org:8890"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            [f"calfat.silo.parties=[{OPEN}]"],
            "calfat.silo: fl.example.org:8890 can be reached from other machines, and there are no certificates. Name "
            "them in calfat.silo.tls (`calfat certs DIR` makes a test set), or write calfat.silo.insecure: true for a "
            "network in which everyone may read and join.",
        ),
        (
            ["calfat.silo.bind=0.0.0.0"],
            "calfat.silo: 0.0.0.0 can be reached from other machines, and there are no certificates. Name them in "
            "calfat.silo.tls (`calfat certs DIR` makes a test set), or write calfat.silo.insecure: true for a network "
            "in which everyone may read and join.",
        ),
        (
            ["common_args.scenario=hierarchical"],
            "common_args.scenario: got 'hierarchical' (text), but the host ends the process as soon as it is asked for "
            "hierarchical silos (fedml 0.9.6, __init__.py:389). Remove the key, or write horizontal.",
        ),
        (
            ["train_args.federated_optimizer=FedProx"],
            "train_args.federated_optimizer: 'FedProx' cannot be run: the host's cross-silo runtime knows FedAvg only. "
            "Write FedAvg and name the algorithm in calfat.aggregator.",
        ),
        (
            ["comm_args.backend=NCCL"],
            "comm_args.backend: 'NCCL' cannot be run: the host's NCCL simulator is not in its wheel (fedml 0.9.6, "
            "simulation/simulator.py:220). Expected one of sp, MPI, GRPC, MQTT_S3.",
        ),
        (
            ["comm_args.backend=sp"],
            "comm_args.backend: 'sp' cannot carry a cross-silo run; write GRPC, MPI, MQTT_S3.",
        ),
        (
            ["comm_args.backend=MQTT_S3", "calfat.silo.mqtt.broker='mq.example.org:1883'"],
            "calfat.silo: messages would cross the network to the broker mq.example.org:1883 in the open. Name "
            "certificates in calfat.silo.tls (`calfat certs DIR --broker HOST` makes a test set), or write "
            "calfat.silo.mqtt.tls: true for a broker with a certificate of its own, or calfat.silo.insecure: true for "
            "a network in which everyone may read and join.",
        ),
        (
            ["comm_args.backend=MQTT_S3", "calfat.silo.s3.endpoint='http://s3.example.org'"],
            "calfat.silo.s3.endpoint: models would cross the network to http://s3.example.org in the open. Give the "
            "store a certificate and write https://, or write calfat.silo.insecure: true for a network in which "
            "everyone may read along.",
        ),
        (
            ["calfat.silo.mqtt.broker=mq.example.org"],
            "calfat.silo.mqtt.broker: got 'mq.example.org' (text), expected host:port such as 127.0.0.1:1883.",
        ),
        (
            ["calfat.silo.mqtt.run=a/b"],
            "calfat.silo.mqtt.run: got 'a/b' (text), expected letters, digits, '.', '_' and '-'.",
        ),
        (
            ["calfat.silo.mqtt.username=me"],
            "calfat.silo.mqtt: username and password_file go together; give both or none.",
        ),
        (
            ["calfat.silo.s3.endpoint='https://me:secret@s3.example.org'"],
            "calfat.silo.s3.endpoint: credentials do not belong in a recipe; boto3 reads them from the environment.",
        ),
        (
            ["calfat.silo.s3.endpoint=s3.example.org"],
            "calfat.silo.s3.endpoint: got 's3.example.org' (text), expected a URL such as http://127.0.0.1:9000, or "
            "null.",
        ),
        (
            ["calfat.silo.s3.bucket=''"],
            "calfat.silo.s3.bucket: got '' (text), expected letters, digits, '.', '_' and '-'.",
        ),
        (
            ["calfat.silo.parties=[127.0.0.1:1, 127.0.0.1:2]"],
            "calfat.silo.parties: got 2 addresses, expected 3: the server's, then one for each of the 2 clients "
            "(train_args.client_num_in_total).",
        ),
        (
            ["calfat.silo.parties=[127.0.0.1:1, 127.0.0.1:2, 127.0.0.1]"],
            "calfat.silo.parties[2]: got '127.0.0.1' (text), expected host:port such as 127.0.0.1:8890.",
        ),
        (
            ["calfat.silo.parties=[127.0.0.1:1, 127.0.0.1:2, 127.0.0.1:2]"],
            "calfat.silo.parties[2]: 127.0.0.1:2 is already the address of rank 1.",
        ),
        (
            ["calfat.silo.min_clients=3"],
            "calfat.silo.min_clients: got 3, but there are only 2 clients (train_args.client_num_in_total).",
        ),
        (
            ["calfat.silo.tls={ca: ca.pem, cert: c.pem}"],
            "calfat.silo.tls: section 'tls' needs the option 'key': a text.",
        ),
    ],
)
def test_check_refuses_what_cannot_run(tmp_path: Path, changes: list[str], complaint: str) -> None:
    words = [word for change in changes for word in ("--set", change)]
    done = CliRunner().invoke(main, ["check", str(Federation(tmp_path).recipe), *words])
    assert done.exit_code == 2
    assert done.output.strip().endswith(f": {complaint}")


def test_insecure_and_ipv6_loopback_are_taken(tmp_path: Path) -> None:
    recipe = str(Federation(tmp_path).recipe)
    for parties, insecure in ((OPEN, "true"), ("'[::1]:8890', 'localhost:8891', '127.0.0.2:8892'", "false")):
        words = ["--set", f"calfat.silo.parties=[{parties}]", "--set", f"calfat.silo.insecure={insecure}"]
        done = CliRunner().invoke(main, ["check", recipe, *words])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["calfat.silo.mqtt={broker: 'mq.example.org:8883', tls: true}", "calfat.silo.s3={endpoint: null}"],
        ["calfat.silo.mqtt.broker='mq.example.org:8883'", "calfat.silo.tls={ca: a, cert: b, key: c}"],
        ["calfat.silo.mqtt.broker='mq:1883'", "calfat.silo.s3.endpoint='http://s3'", "calfat.silo.insecure=true"],
    ],
)
def test_brokers_and_stores_that_are_safe_are_taken(tmp_path: Path, changes: list[str]) -> None:
    words = [word for change in ["comm_args.backend=MQTT_S3", *changes] for word in ("--set", change)]
    done = CliRunner().invoke(main, ["check", str(Federation(tmp_path).recipe), *words])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            "",
            "a cross-silo run has a process for each party. Start them all on this machine with --local, or one with "
            "--role server, or with --role client --rank K (1 to 2).",
        ),
        (
            "--set train_args.client_num_per_round=1",  # a round's clients are fewer; the parties are not
            "a cross-silo run has a process for each party. Start them all on this machine with --local, or one with "
            "--role server, or with --role client --rank K (1 to 2).",
        ),
        (
            "--role client --rank 3",
            "--rank 3: the clients of this recipe have ranks 1 to 2 (train_args.client_num_in_total); rank 0 is the "
            "server's.",
        ),
        (
            "--role server --set calfat.silo.parties=null",
            "calfat.silo.parties: there are no addresses. List host:port of the server, then of each client; only "
            "--local chooses its own.",
        ),
        (
            "--local --set common_args.training_type=simulation --set comm_args.backend=sp",
            "--local, --role and --rank are for runs of several processes; this recipe is a simulation in one. Add "
            "--set common_args.training_type=cross_silo --set comm_args.backend=GRPC, or --set comm_args.backend=MPI "
            "for a simulation over MPI.",
        ),
        (
            "--rank 1 --set comm_args.backend=MPI",
            "over MPI the job gives each process its rank: leave out --role and --rank, and start mpiexec -n 3 "
            "calfat run RECIPE, or calfat run RECIPE --local.",
        ),
    ],
)
def test_run_says_which_party_to_be(tmp_path: Path, options: str, complaint: str) -> None:
    done = CliRunner().invoke(main, ["run", str(Federation(tmp_path).recipe), *options.split()])
    assert done.exit_code == 2
    assert done.output.strip().endswith(complaint)


def test_certificates_are_not_written_twice(tmp_path: Path) -> None:
    first = CliRunner().invoke(main, ["certs", str(tmp_path / "c"), "--clients", "1"])
    assert first.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        *("ca.key", "ca.pem", "rank-0.key", "rank-0.pem", "rank-1.key", "rank-1.pem"),
    ]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "c").glob("*.key"))
    again = CliRunner().invoke(main, ["certs", str(tmp_path / "c"), "--clients", "1"])
    assert again.exit_code == 2
    assert (
        again.output == f"error: {tmp_path / 'c'}: holds certificates already; choose another folder, or remove them.\n"
    )
