"""FedML's ``defense_args`` select an aggregator, the run says which, and its own recipe says it in our words."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.defenses import DEFENSES
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.testing import builtin_registry
from tests.recipe.test_host_keys import host_folder
from tests.snapshot import TextSnapshot

ASKED = [
    ("krum", {"byzantine_client_num": 2}, "krum", {"f": 2}),
    (
        "multikrum",
        {"byzantine_client_num": 2, "krum_param_m": 4},
        "multi_krum",
        {"f": 2, "m": 4, "weights": "examples"},
    ),
    ("bulyan", {"byzantine_client_num": 2}, "bulyan", {"f": 2}),
    ("wise_median", {}, "median", {}),
    ("trimmed_mean", {"byzantine_client_num": 3}, "trimmed_mean", {"f": 3}),
    ("rfa", {}, "geometric_median", {"weights": "examples"}),
    ("cclip", {"tau": 10}, "centered_clipping", {"radius": 10.0, "weights": "examples"}),
    ("norm_diff_clipping", {"norm_bound": 0.17}, "norm_clipping", {"bound": 0.17, "weights": "examples"}),
]


def resolved(keys: dict[str, Any], clients: int = 11, **calfat: Any) -> Experiment:
    recipe = {
        "model_args": {"model": "cnn_small"},
        "train_args": {"client_num_in_total": clients, "comm_round": 1},
        "defense_args": {"enable_defense": True, **keys},
        "calfat": {"trainer": "fedpgd", **calfat},
    }
    return assemble(parse_document(yaml.safe_dump(recipe, sort_keys=False), "r.yaml"), builtin_registry())


@pytest.mark.parametrize(("kind", "parameters", "aggregator", "options"), ASKED, ids=[row[0] for row in ASKED])
def test_a_defence_selects_an_aggregator(
    kind: str, parameters: dict[str, Any], aggregator: str, options: dict[str, Any]
) -> None:
    experiment = resolved({"defense_type": kind, **parameters})
    chosen = experiment.aggregator
    assert chosen.name == aggregator
    assert {name: getattr(chosen.options, name) for name in options} == options
    (warning,) = experiment.warnings
    assert warning.startswith(f"r.yaml:6: defense_args: FedML's '{kind}' is calfat.aggregator: {{name: {aggregator}")
    written = experiment.as_run()
    assert "defense_args" not in written
    again = assemble(parse_document(yaml.safe_dump(written), "recipe.yaml"), builtin_registry())
    assert again.aggregator.options == chosen.options
    assert again.warnings == ()


def test_the_sentence_is_whole() -> None:
    (warning,) = resolved({"defense_type": "multikrum", "byzantine_client_num": 2}).warnings
    text = "FedML's 'multikrum' is calfat.aggregator: {name: multi_krum, f: 2, weights: examples} here."
    assert warning == f"r.yaml:6: defense_args: {text}"


def test_each_defence_is_tried_above() -> None:
    assert {row[0] for row in ASKED} == set(DEFENSES)


def test_they_are_the_hosts_names() -> None:
    source = (host_folder() / "core" / "security" / "constants.py").read_text(encoding="utf-8")
    names = {
        node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert set(DEFENSES) - names == {"bulyan"}  # a file of its defences that its own switch forgets
    assert (host_folder() / "core" / "security" / "defense" / "bulyan_defense.py").exists()


def test_too_many_attackers_are_refused_at_the_hosts_keys(snapshot: TextSnapshot) -> None:
    with snapshot.raises(RecipeError):
        resolved({"defense_type": "krum", "byzantine_client_num": 2}, clients=5)


def test_a_wrong_value_is_refused_at_the_hosts_keys() -> None:
    with pytest.raises(RecipeError, match=r"^r\.yaml:6: defense_args: calfat\.aggregator\.radius: got -1 \(int\), "):
        resolved({"defense_type": "cclip", "tau": -1})


def test_it_acts_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli.runner import calfat

    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "model_args: {model: cnn_small}\n"
        "train_args: {client_num_in_total: 5, comm_round: 1, batch_size: 512}\n"
        "defense_args: {enable_defense: true, defense_type: krum, byzantine_client_num: 1}\n"
        "calfat: {trainer: standard, evaluators: [natural], monitor: {evaluators: [natural]}}\n"
    )
    done = calfat("run", "r.yaml", "--run-dir", "run")
    assert done.code == 0, done.err
    assert "FedML's 'krum' is calfat.aggregator: {name: krum, f: 1} here." in done.err
    header, row = Path("run/rounds.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(values["server/tolerated"]) == 1
    assert float(values["server/selected"]) in range(5)
