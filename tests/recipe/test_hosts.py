"""Which host runs a recipe: said by check, which imports none, and what Flower does not have is refused there."""

from __future__ import annotations

import pytest
import yaml

from calfat_plugin.errors import HostError, RunError
from calfat_plugin.host import installed
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.runs.request import checked_experiment
from calfat_plugin.runs.workers import check_workers
from tests.cli.runner import RECIPES, calfat, python
from tests.snapshot import TextSnapshot

FLOWER = "common_args.host=flower"
REFUSED = {
    "backend": ["comm_args.backend=MPI"],
    "gpu_id": ["device_args.using_gpu=true", "device_args.gpu_id=1"],
    "gpus without": ["calfat.flower.client_gpus=0.5"],
    "no gpus": ["device_args.using_gpu=true", "calfat.flower.client_gpus=0"],
    "silo": ["common_args.training_type=cross_silo", "calfat.silo.min_clients=3"],
    "cpus": ["calfat.flower.client_cpus=0"],
    "unknown": ["common_args.host=flowr"],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_flower_does_not_have_is_refused_at_check(what: str, snapshot: TextSnapshot) -> None:
    changes = (word for change in (FLOWER, *REFUSED[what]) for word in ("--set", change))
    ended = calfat("check", str(RECIPES / "calfat_digits.yaml"), *changes)
    assert ended.code == 2
    snapshot(ended.err)


def test_check_says_which_host_and_imports_none() -> None:
    program = """
import sys
from calfat_plugin.cli.main import main
try:
    main(["check", sys.argv[1], "--host", "flower"])
except SystemExit as ended:
    assert not ended.code, ended.code
assert not {"flwr", "ray", "fedml", "torch"} & set(sys.modules)
"""
    ended = python(program, str(RECIPES / "calfat_digits.yaml"))
    assert ended.code == 0, ended.err
    assert ended.out.endswith("seed 0, on Flower.\n")


def test_a_recipe_as_run_names_its_host_only_where_it_is_another() -> None:
    document = read_document(str(RECIPES / "calfat_digits.yaml"))
    plain = checked_experiment(document).as_run()
    assert "host" not in plain["common_args"]
    assert "flower" not in plain["calfat"]
    assert checked_experiment(document, ["common_args.host=fedml"]).as_run() == plain
    on_flower = checked_experiment(document, [FLOWER]).as_run()
    assert on_flower["common_args"].pop("host") == "flower"
    assert on_flower["calfat"].pop("flower") == {"client_cpus": None, "client_gpus": None}
    assert on_flower == plain
    again = checked_experiment(
        parse_document(yaml.safe_dump(checked_experiment(document, [FLOWER]).as_run()), "r.yaml")
    )
    assert again.common.host == "flower"
    assert again.warnings == ()


def test_workers_are_for_fedml(snapshot: TextSnapshot) -> None:
    experiment = checked_experiment(read_document(str(RECIPES / "calfat_digits.yaml")), [FLOWER])
    with pytest.raises(RunError) as refused:
        check_workers(runtime_of(experiment))
    snapshot(str(refused.value))


@pytest.mark.parametrize("versions", [{}, {"flwr": "1.42.0"}, {"flwr": "1.43.0", "ray": "2.55.1"}], ids=str)
def test_a_run_says_which_flower_it_needs(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.setattr(installed, "version_of", versions.get)
    experiment = checked_experiment(read_document(str(RECIPES / "calfat_digits.yaml")), [FLOWER])
    with pytest.raises(HostError) as refused:
        runtime_of(experiment).refuse_without_host()
    snapshot(str(refused.value))
    monkeypatch.setattr(installed, "version_of", {"flwr": "1.42.3", "ray": "2.55.1"}.get)
    runtime_of(experiment).refuse_without_host()
