"""Values that are allowed and were probably not meant: each draws one warning, and what is nearly one draws none."""

from __future__ import annotations

import pytest
import yaml

from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.experiment.implausible import classes_not_trained, too_large_batches
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.testing import builtin_registry
from tests.snapshot import TextSnapshot

RECIPE = """\
model_args: {model: cnn_small}
train_args: {client_num_in_total: 9, comm_round: 4, batch_size: 32}
calfat:
  trainer: fedpgd
  evaluators: [natural, pgd20]
  monitor: {every: 1, evaluators: [natural]}
"""


def resolved(*overrides: str, trains: bool = True) -> Experiment:
    return assemble(parse_document(RECIPE, "r.yaml").with_overrides(overrides), builtin_registry(), trains=trains)


SORA, SMOOTH = "calfat.threat.inner=sora", "calfat.trainer={name: fedpgd, label_smoothing: 0.1}"
WARNED = [
    ("calfat.threat.eps", ["calfat.threat.eps=0"]),
    ("calfat.threat.eps", ["calfat.threat.eps=0", "calfat.trainer=standard"]),
    ("calfat.clients[0].threat.eps", ["calfat.clients=[{ids: 0, threat: {eps: 0}}]"]),
    ("calfat.evaluators[0].eps", ["calfat.evaluators=[{name: autoattack, eps: 0}]"]),
    ("calfat.monitor.evaluators[0].eps", ["calfat.monitor.evaluators=[{name: pgd5, eps: 0}]"]),
    ("calfat.clients[0].threat", ["calfat.clients=[{ids: 0, trainer: standard, threat: {eps: 4/255}}]"]),
    ("calfat.clients[0].threat", ["calfat.trainer=standard", "calfat.clients=[{ids: 0, threat: {eps: 4/255}}]"]),
    ("calfat.threat.inner", [SORA, SMOOTH]),
    ("calfat.reported.pdg20", ["calfat.reported={pdg20: 50, bim: 40}"]),
    ("calfat.clients[0]", [SMOOTH, "calfat.clients=[{ids: 0, threat: {inner: {name: sora, slack: 0.01}}}]"]),
    ("calfat.threat.inner", ["calfat.threat.inner=atas"]),  # which adapts from round 6 on, of 4
    ("calfat.threat.by_class", ["calfat.threat.by_class={}", "train_args.comm_round=1"]),
]


@pytest.mark.parametrize(("key", "overrides"), WARNED, ids=range(len(WARNED)))
def test_what_was_probably_not_meant_is_warned_of(key: str, overrides: list[str], snapshot: TextSnapshot) -> None:
    (warning,) = resolved(*overrides).warnings
    assert warning.startswith("--set calfat.")
    assert f": {key}: " in warning
    snapshot(warning)
    assert resolved(*overrides, trains=False).warnings == ()  # of a finished model that is attacked


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["calfat.threat.eps=0", "calfat.trainer=standard", "calfat.evaluators=[natural]"],
        ["calfat.threat.eps=0", "calfat.trainer=standard", "calfat.evaluators=[natural, {name: pgd20, eps: 0.1}]"],
        ["calfat.clients=[{ids: 0, trainer: standard}]"],
        ["calfat.reported={pgd20: 50, bim: 40}"],
        ["calfat.threat.inner={name: atas, warmup: 3}"],
        ["calfat.threat.by_class={}", "train_args.comm_round=2"],
        ["calfat.threat.by_class={warmup: 0}", "train_args.comm_round=1"],
        [SORA], [SORA, "calfat.trainer={name: fedpgd, label_smoothing: 0.02}"],
        [SMOOTH, "calfat.threat.inner={name: sora, alignment: cosine}"],
        [SORA, "calfat.trainer={name: standard, label_smoothing: 0.1}", "calfat.clients=[{ids: 0, trainer: fedpgd}]"],
        ["calfat.trainer=standard", "calfat.clients=[{ids: 0, trainer: fedpgd, threat: {eps: 4/255}}]"],
    ],
)  # fmt: skip
def test_what_may_well_be_meant_is_not(overrides: list[str]) -> None:
    assert resolved(*overrides).warnings == ()


NOISE = "calfat.trainer={name: calfat, start_noise: 0.01}"


@pytest.mark.parametrize("inner", ["rs-fgsm", "n-fgsm", "sora", "{name: atas, warmup: 1}"])
def test_noise_of_a_start_that_the_attack_does_not_take_is_warned_of(inner: str) -> None:
    (warning,) = resolved(NOISE, f"calfat.threat.inner={inner}").warnings
    assert "calfat.trainer.start_noise: this key has no effect here: the inner attack" in warning
    assert resolved("calfat.trainer=calfat", f"calfat.threat.inner={inner}").warnings == ()
    group = "calfat.clients=[{ids: 0, threat: {inner: pgd}}]"
    assert resolved(NOISE, f"calfat.threat.inner={inner}", group).warnings == ()  # it takes it
    usual = NOISE.replace("0.01", "0.001")  # as every recipe as run has it
    assert resolved(usual, f"calfat.threat.inner={inner}").warnings == ()


@pytest.mark.parametrize(
    ("options", "name", "why"),
    [
        ("name: fedgairat, weighting: discrete, lam: 3, start_round: 2", "lam", "discrete weights have no shift"),
        ("name: fedrbn, pnc: 0.9", "pnc", "no client that trains by these options has"),
        ("name: fedrbn, role: at, debias: 0.3", "debias", "no client that trains by these options has"),
        ("name: calfat, preset: release, delta: 0.5", "delta", "it is added to class frequencies"),
        ("name: fedpgd, loss: {name: calibrated, prior: counts, delta: 0.5}", "loss.delta", "it is added to class"),
    ],
)
def test_an_option_that_another_makes_useless_is_warned_of(options: str, name: str, why: str) -> None:
    (warning,) = resolved(f"calfat.trainer={{{options}}}").warnings
    assert f": calfat.trainer.{name}: this key has no effect here: {why}" in warning


@pytest.mark.parametrize(
    "options",
    [
        "name: fedgairat, weighting: discrete, lam: -1, start_round: 2",  # as every recipe as run has it
        "name: fedgairat, lam: 3, start_round: 2",
        "name: fedrbn, at_fraction: 0.5, pnc: 0.9",
        "name: fedrbn, roles: at st st st st st st st st, pnc: 0.9",
        "name: calfat, delta: 0.5",
        "name: calfat, preset: release, delta: null",
    ],
)
def test_an_option_that_is_used_or_as_usual_is_not(options: str) -> None:
    assert resolved(f"calfat.trainer={{{options}}}").warnings == ()


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ("mixfat, ratio: 0.03", ["calfat.trainer", "calfat.clients[1]"]),
        ("calfat, adv_ratio: 0.03", ["calfat.trainer", "calfat.clients[1]"]),
        ("mixfat, ratio: 0.1", ["calfat.clients[1]"]),  # the group of smaller batches
    ],
)
def test_a_mixture_that_is_rounded_down_to_no_example_is_warned_of(trainer: str, keys: list[str]) -> None:
    groups = "calfat.clients=[{ids: 0, epochs: 2}, {ids: 1, batch_size: 8}]"
    found = [warning.rpartition(": '") for warning in resolved(f"calfat.trainer={{name: {trainer}}}", groups).warnings]
    assert [place.rpartition(": ")[2] for place, _, _ in found] == keys
    assert all("' never attacks: a share of 0." in text for _, _, text in found)


@pytest.mark.parametrize(
    "trainer", ["mixfat, ratio: 0.03125", "mixfat, ratio: 0", "mixfat, ratio: 0.03, sampling: fixed"]
)
def test_a_mixture_that_attacks_some_or_none_at_all_is_not(trainer: str) -> None:
    assert resolved(f"calfat.trainer={{name: {trainer}}}").warnings == ()


@pytest.mark.parametrize("inner", ["pgd", "rs-fgsm", "n-fgsm", "{name: atas, warmup: 1}", "sora", "free"])
def test_a_recipe_as_run_draws_no_warning_of_a_value_that_nobody_wrote(inner: str) -> None:
    found = resolved(f"calfat.threat.inner={inner}")
    again = parse_document(yaml.safe_dump(found.as_run()), "as_run.yaml")
    assert (found.warnings, assemble(again, builtin_registry()).warnings) == ((), ())


def test_what_training_would_not_use_is_nothing_to_one_who_attacks_a_finished_model() -> None:
    overrides = (
        *("calfat.threat.inner=n-fgsm", "calfat.threat.steps=7"),
        *("data_args.partition_method=iid", "data_args.partition_alpha=0.3"),
        "train_args.federated_optimizer=FedProx",
        "calfat.trainer={name: fedpgd, awp: {warmup: 9}}",
    )
    assert len(resolved(*overrides).warnings) == 4
    assert resolved(*overrides, trains=False).warnings == ()


@pytest.mark.parametrize("inner", ["pgd", "free"])
def test_noise_of_a_start_that_the_attack_takes_is_not(inner: str) -> None:
    assert resolved(NOISE, f"calfat.threat.inner={inner}").warnings == ()


def test_batches_larger_than_every_clients_data_are_warned_of(snapshot: TextSnapshot) -> None:
    experiment = resolved()
    snapshot(too_large_batches(experiment, {}, {0: 31, 1: 7}))
    assert too_large_batches(experiment, {}, {0: 31, 1: 32}) == ""
    grouped = resolved("calfat.clients=[{ids: 0, batch_size: 8}]")
    assert too_large_batches(grouped, {0: grouped.clients[0]}, {0: 8, 1: 7}) == ""
    assert too_large_batches(grouped, {0: grouped.clients[0]}, {0: 7, 1: 31})


def test_classes_that_no_client_trains_on_are_warned_of(snapshot: TextSnapshot) -> None:
    snapshot(classes_not_trained(resolved(), ("0", "1", "2"), [[0, 3, 0], [0, 0, 2]]))  # labels that begin at 1
    snapshot(classes_not_trained(resolved(), "abcdef", [[1, 0, 0, 0, 0, 1]]))
    assert classes_not_trained(resolved(), ("0", "1", "2"), [[0, 3, 0], [1, 0, 2]]) == ""
