"""The section ``choose`` of a suite file: what is refused, and with which words."""

from __future__ import annotations

import pytest

from calfat_plugin.errors import OptionError, RecipeError
from tests.suites.files import CHOOSING

RATES = "grid: {train_args.learning_rate: [0.02, 0.05, 0.1]}"
NOT_A_METRIC = "expected an evaluator such as pgd20, or several such as mean(natural, pgd20)."
MEASURED = "this key changes what is measured, so its values could not be compared; remove it."


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("metric: pgd20", "metrc: pgd20", "11: choose.metrc: unknown key. Did you mean 'metric'?"),
        ("metric: pgd20", "metric: 3", f"11: choose.metric: got 3 (int), {NOT_A_METRIC}"),
        ("metric: pgd20", "metric: mean()", f"11: choose.metric: got 'mean()' (text), {NOT_A_METRIC}"),
        ("metric: pgd20", "metric: mean(a, a)", f"11: choose.metric: got 'mean(a, a)' (text), {NOT_A_METRIC}"),
        ("  metric: pgd20\n", "", f"10: choose.metric: got nothing (null), {NOT_A_METRIC}"),
        (
            "metric: pgd20",
            "metric: fgsm",
            "11: choose.metric: 'fgsm' is not among the evaluators of the run: natural, pgd20. (In cell 'CalFAT' of "
            "tiny.yaml.)",
        ),
        (
            "metric: pgd20",
            "metric: pgd20\n  by: first",
            "12: choose.by: got 'first' (text), expected last (the last round's value) or best (any round's).",
        ),
        (
            "seeds: [100, 101]",
            "seeds: [100, 100]",
            "12: choose.seeds[1]: the seed 100 is listed twice; keep one.",
        ),
        (
            RATES,
            "grid: {}",
            "13: choose.grid: there is nothing to try; expected a mapping such as {train_args.learning_rate: "
            "[0.02, 0.05, 0.1]}.",
        ),
        (
            RATES,
            "grid: {train_args.learning_rate: 0.1}",
            "13: choose.grid.train_args.learning_rate: got 0.1 (float), expected a list of the values to try, such as "
            "[0.02, 0.05, 0.1].",
        ),
        (
            RATES,
            "grid: {train_args.learning_rate: []}",
            "13: choose.grid.train_args.learning_rate: got an empty list, expected a list of the values to try, such "
            "as [0.02, 0.05, 0.1].",
        ),
        (
            RATES,
            "grid: {train_args.learning_rate: [0.1, fast]}",
            "13: train_args.learning_rate: got 'fast' (text), expected a number, > 0. (In cell 'CalFAT, "
            "learning_rate fast' of tiny.yaml.)",
        ),
        (
            RATES,
            "grid: {train_args.learning_rate: [0.1, 1/10]}",
            "13: choose.grid: 'learning_rate 0.1' and 'learning_rate 1/10' of the cell 'CalFAT' are the same run; "
            "keep one.",
        ),
        (
            RATES,
            "grid: {train_args.comm_round: [1, 2]}",
            "13: choose.grid.train_args.comm_round: 'train_args.comm_round' is set in set (tiny.yaml:3), too; remove "
            "it in one of the two places.",
        ),
        (
            RATES,
            "grid: {calfat.trainer: [mixfat, fedpgd]}",
            "13: choose.grid.calfat.trainer: 'calfat.trainer' is set in axes.method (tiny.yaml:9), too; remove it in "
            "one of the two places.",
        ),
        (RATES, "grid: {calfat.threat.eps: [0.1, 0.2]}", f"13: choose.grid.calfat.threat.eps: {MEASURED}"),
        (RATES, "grid: {calfat.threat: [{eps: 0.1}]}", f"13: choose.grid.calfat.threat: {MEASURED}"),
        (
            RATES,
            "grid: {data_args.validation_share: [0.1, 0.2]}",
            f"13: choose.grid.data_args.validation_share: {MEASURED}",
        ),
        (
            RATES,
            "grid: {train_args.learning_rate: [0.1, 0.2], train_args.lr_step_size: [null, 2]}",
            "13: train_args.lr_step_size: this key has no effect here: it needs train_args.lr_schedule: step. So it "
            "cannot be chosen; remove it. (In cell 'CalFAT' of tiny.yaml.)",
        ),
        (
            RATES,
            "grid: {train_args.batchsize_server: [1, 2]}",
            "13: train_args.batchsize_server: this key is unknown to FedML and calfat_plugin and has no effect. Did "
            "you mean 'batch_size'? So it cannot be chosen; remove it. (In cell 'CalFAT' of tiny.yaml.)",
        ),
        *(
            (
                RATES,
                f"grid: {{{section}.{key}: [{first}, {second}]}}",
                f"13: choose.grid: '{key} {first}' and '{key} {second}' of the cell 'CalFAT' are the same run, for "
                "what they differ in changes no result; keep one.",
            )
            for section, key, first, second in (
                ("calfat.silo", "min_clients", 1, 2),
                ("calfat.runtime", "cuda_graphs", "never", "auto"),
                ("device_args", "gpu_id", 0, 1),
            )
        ),
        (
            RATES,
            "grid: {train_args.learning_rate: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], "
            "train_args.batch_size: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}",
            "10: choose: the cell 'CalFAT' would make 110 tries, at most 100 are allowed. Leave out values or keys.",
        ),
        (
            RATES,
            RATES + "\n  own: {CalFTA: {calfat.trainer.scale: [1, 10]}}",
            "14: choose.own.CalFTA: 'CalFTA' matches no cell. Did you mean 'CalFAT'?",
        ),
        (
            RATES,
            RATES + "\n  own: {FedPGD: {calfat.trainer.start_noise: [0.1], calfat.trainer: [fedpgd]}}",
            "14: choose.own.FedPGD.calfat.trainer: this key overlaps with 'calfat.trainer.start_noise' in the same "
            "mapping; combine the two.",
        ),
    ],
)
def test_a_bad_section_is_refused_with_its_place(old, new, complaint, plan_of):
    assert CHOOSING.count(old) == 1
    with pytest.raises(RecipeError) as caught:
        plan_of(CHOOSING.replace(old, new))
    assert str(caught.value) == f"tiny.yaml:{complaint}"


def test_no_validation_split_is_refused_with_what_to_do(plan_of):
    with pytest.raises(RecipeError) as caught:
        plan_of(CHOOSING.replace(", data_args.validation_share: 0.2", ""))
    assert str(caught.value) == (
        "tiny.yaml:10: choose: there is no validation split, and what is chosen on test examples is no test of it. Set "
        "data_args.validation_share, such as 0.1, in the suite's 'set' or in the base recipe. (In cell 'CalFAT' of "
        "tiny.yaml.)"
    )


def test_an_override_of_what_is_chosen_is_refused(plan_of):
    with pytest.raises(OptionError) as caught:
        plan_of(overrides=["train_args.learning_rate=0.3"])
    assert str(caught.value) == (
        "--set: 'train_args.learning_rate' is chosen by tiny.yaml (tiny.yaml:13); select cells with --only, or change "
        "the suite file."
    )


def test_values_too_long_for_a_folder_are_refused(plan_of):
    trainers = "{name: calfat, preset: release}, {name: calfat, preset: paper, prior_weight: 0.5, scale: 10}"
    base = CHOOSING.replace("    CalFAT: {}\n", "").replace("FedPGD: {calfat.trainer: fedpgd}", "All: {}")
    quarter = f"'0.25{'0' * 60}'"[:32] + "'"
    long = f"{trainers[:-1]}, start_noise: {quarter}, outer: plain, inner: kl, adv_ratio: {quarter}, loss: null}}"
    with pytest.raises(RecipeError) as caught:
        plan_of(base.replace(RATES, f"grid: {{calfat.trainer: [{long}]}}"))
    assert str(caught.value) == (
        "tiny.yaml:12: choose.grid.calfat.trainer: its values are too long to name a folder (tiny.yaml:12); write "
        "fewer options."
    )
