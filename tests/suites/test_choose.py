"""The section ``choose`` of a suite file: what is refused, and with which words."""

from __future__ import annotations

import pytest

from calfat_plugin.errors import OptionError, RecipeError
from tests.suites.files import CHOOSING

RATES = "grid: {train_args.learning_rate: [0.02, 0.05, 0.1]}"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("metric: pgd20", "metrc: pgd20", "11: choose.metrc"),
        ("metric: pgd20", "metric: 3", "11: choose.metric"),
        ("metric: pgd20", "metric: mean()", "11: choose.metric"),
        ("metric: pgd20", "metric: mean(a, a)", "11: choose.metric"),
        ("  metric: pgd20\n", "", "10: choose.metric"),
        ("metric: pgd20", "metric: fgsm", "11: choose.metric"),
        ("metric: pgd20", "metric: pgd20\n  by: last", "12: choose.by"),
        ("seeds: [100, 101]", "seeds: [100, 100]", "12: choose.seeds[1]"),
        (RATES, "grid: {}", "13: choose.grid"),
        (RATES, "grid: {train_args.learning_rate: 0.1}", "13: choose.grid.train_args.learning_rate"),
        (RATES, "grid: {train_args.learning_rate: []}", "13: choose.grid.train_args.learning_rate"),
        (RATES, "grid: {train_args.learning_rate: [0.1, fast]}", "13: train_args.learning_rate"),
        (RATES, "grid: {train_args.learning_rate: [0.1, 1/10]}", "13: choose.grid"),
        (RATES, "grid: {train_args.comm_round: [1, 2]}", "13: choose.grid.train_args.comm_round"),
        (RATES, "grid: {calfat.trainer: [mixfat, fedpgd]}", "13: choose.grid.calfat.trainer"),
        (RATES, "grid: {calfat.threat.eps: [0.1, 0.2]}", "13: choose.grid.calfat.threat.eps"),
        (RATES, "grid: {calfat.threat: [{eps: 0.1}]}", "13: choose.grid.calfat.threat"),
        (RATES, "grid: {data_args.validation_share: [0.1, 0.2]}", "13: choose.grid.data_args.validation_share"),
        (
            RATES,
            "grid: {train_args.learning_rate: [0.1, 0.2], train_args.lr_step_size: [null, 2]}",
            "13: train_args.lr_step_size",
        ),
        (RATES, "grid: {train_args.batchsize_server: [1, 2]}", "13: train_args.batchsize_server"),
        (RATES, "grid: {calfat.silo.min_clients: [1, 2]}", "13: choose.grid"),
        (RATES, "grid: {device_args.gpu_id: [0, 1]}", "13: choose.grid"),
        (
            RATES,
            "grid: {train_args.learning_rate: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], "
            "train_args.batch_size: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}",
            "10: choose",
        ),
        (RATES, RATES + "\n  set: {calfat.threat.eps: 0.2}", "14: choose.set.calfat.threat.eps"),
        (RATES, RATES + "\n  set: {train_args.learning_rate: 0.2}", "13: choose.grid.train_args.learning_rate"),
        (RATES, RATES + "\n  set: {common_args.random_seed: 3}", "14: choose.set.common_args.random_seed"),
    ],
)
def test_a_bad_section_is_refused_with_its_place(old, new, place, plan_of, snapshot):
    assert CHOOSING.count(old) == 1
    with snapshot.raises(RecipeError, f"tiny.yaml:{place}: "):
        plan_of(CHOOSING.replace(old, new))


def test_no_validation_split_and_an_override_of_what_is_chosen_are_refused(plan_of, snapshot):
    with snapshot.raises(RecipeError):
        plan_of(CHOOSING.replace(", data_args.validation_share: 0.2", ""))
    with snapshot.raises(OptionError):
        plan_of(overrides=["train_args.learning_rate=0.3"])


def test_values_too_long_for_a_folder_are_refused(plan_of, snapshot):
    trainers = "{name: calfat, preset: release}, {name: calfat, preset: paper, prior_weight: 0.5, scale: 10}"
    base = CHOOSING.replace("    CalFAT: {}\n", "").replace("FedPGD: {calfat.trainer: fedpgd}", "All: {}")
    quarter = f"'0.25{'0' * 60}'"[:32] + "'"
    long = f"{trainers[:-1]}, start_noise: {quarter}, outer: plain, inner: kl, adv_ratio: {quarter}, loss: null}}"
    with snapshot.raises(RecipeError):
        plan_of(base.replace(RATES, f"grid: {{calfat.trainer: [{long}]}}"))
