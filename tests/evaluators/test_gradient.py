"""Starts, restarts, logit scale, options and findings of FGSM, BIM, PGD and CW."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from calfat_plugin.builtin import calfat_evaluators
from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import OptionError
from calfat_plugin.evaluators.gradient import CW, FGSM, PGD, BIMOptions, CWOptions, FGSMOptions, PGDOptions
from calfat_plugin.evaluators.natural import Natural
from calfat_plugin.options import parse_options
from calfat_plugin.threat import ThreatModel

ENTRIES = {entry.name: entry for entry in calfat_evaluators()}


class Scripted(nn.Module):
    """z = W x of methods.md 16, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [-1.0, 1.0]]))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x.flatten(1) @ self.weight.T


X = torch.tensor([0.5, 0.5]).view(1, 1, 1, 2)
Y = torch.tensor([0])


def craft(evaluator, make_task, *, factor=1.0, threat=None):
    model = Scripted(factor).eval()
    task = make_task(model, ImageData(X, Y), num_classes=2, threat=threat or ThreatModel())
    return evaluator.craft(task, X, Y, torch.Generator().manual_seed(0)).flatten().tolist()


# --- methods.md 16 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "expected"), [(1, (0.492157, 0.507843)), (4, (0.468627, 0.531373))])
def test_bim_takes_the_steps_of_the_specification(steps, expected, make_task):
    assert craft(PGD(BIMOptions(steps=steps)), make_task) == pytest.approx(expected, abs=1e-6)


def test_fgsm_takes_one_step_of_eps(make_task):
    assert craft(FGSM(FGSMOptions()), make_task) == pytest.approx((0.468627, 0.531373), abs=1e-6)


def test_l2_moves_along_the_gradient_by_eps(make_task):
    gradient = torch.tensor([-1.244919, 1.867378])
    expected = X.flatten() + 0.2 * gradient / gradient.norm()
    options = BIMOptions(norm="l2", eps=Fraction(1, 5), step_size=Fraction(1, 10), steps=5)
    assert craft(PGD(options), make_task) == pytest.approx(expected.tolist(), abs=1e-5)


def test_l1_puts_the_budget_into_the_pixel_with_the_largest_slope_until_its_bound(make_task):
    def after(steps: int) -> list[float]:
        options = BIMOptions(norm="l1", eps=Fraction(3, 5), step_size=Fraction(1, 5), steps=steps)
        return craft(PGD(options), make_task)

    assert after(3) == pytest.approx((0.5, 1.0), abs=1e-6)
    assert after(4) == pytest.approx((0.35, 0.95), abs=1e-6)  # (0.3, 1) is 0.1 too far: both go back by 0.05
    assert after(5) == pytest.approx((0.4, 1.0), abs=1e-6)


def test_own_eps_and_step_size_win_over_the_runs(make_task):
    found = craft(PGD(BIMOptions(eps=Fraction(1, 10), step_size=Fraction(1, 100), steps=3)), make_task)
    assert found == pytest.approx((0.47, 0.53), abs=1e-6)


# --- CW ---------------------------------------------------------------------------------------------------------------


def test_cw_without_kappa_stops_at_the_first_error(make_task):
    # The margin z_0 - z_1 = 2 x_0 - 3 x_1 is -0.5 at x: broken already, so kappa 0 has no reason to move.
    assert craft(CW(CWOptions(start="x", kappa=0.0)), make_task) == [0.5, 0.5]
    assert craft(CW(CWOptions(start="x", kappa=50.0)), make_task) == pytest.approx((0.468627, 0.531373), abs=1e-6)


@pytest.mark.parametrize(
    ("kappa", "scale", "count"), [(0.0, 1, 0), (0.5, 1, 0), (0.6, 1, 7), (0.6, 2, 0), (0.4, 0.5, 7)]
)
def test_an_example_beyond_kappa_is_not_counted_as_one_of_a_masked_gradient(make_task, kappa, scale, count):
    class Masked(Scripted):
        """The margin is -0.5, and no gradient says how to lower it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach()) + 0 * x.sum()

    task = make_task(Masked(1.0).eval(), ImageData(X.repeat(7, 1, 1, 1), Y.repeat(7)), num_classes=2)
    attack = CW(CWOptions(start="x", kappa=kappa, logit_scale=scale))
    assert attack.evaluate(task, "cw").details == {"zero_gradients": count}
    assert PGD(PGDOptions(start="x")).evaluate(task, "pgd").details == {"zero_gradients": 7}


# --- saturated and flattened logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "scale"), [(-1e4, 1e-4), (-1.0, 1.0)])
def test_a_saturated_softmax_is_undone_by_a_logit_scale(factor, scale, make_task):
    # With the sign turned the example is classified correctly; 10^4 makes its cross-entropy exactly flat.
    stuck = craft(PGD(BIMOptions(steps=4)), make_task, factor=factor)
    scaled = craft(PGD(BIMOptions(steps=4, logit_scale=scale)), make_task, factor=factor)
    assert scaled == pytest.approx((0.531373, 0.468627), abs=1e-6)
    assert (stuck == [0.5, 0.5]) == (factor == -1e4)


def test_a_gradient_that_is_no_number_moves_nothing_and_is_counted(make_task):
    class Undefined(Scripted):
        """Answers are numbers; the slope of the root of 0, 0 times infinity, is none."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0 * (0 * x).sqrt().sum()

    task = make_task(Undefined(1.0).eval(), ImageData(X.repeat(7, 1, 1, 1), Y.repeat(7)), num_classes=2)
    assert PGD(PGDOptions(start="x")).evaluate(task, "pgd20").details == {"zero_gradients": 7}


def test_zero_gradients_at_the_start_are_counted(make_task):
    task = make_task(Scripted(-1e4).eval(), ImageData(X.repeat(7, 1, 1, 1), Y.repeat(7)), num_classes=2)
    assert PGD(PGDOptions(restarts=2)).evaluate(task, "pgd20").details == {"zero_gradients": 7}
    assert PGD(PGDOptions(logit_scale=1e-4)).evaluate(task, "pgd20").details == {"zero_gradients": 0}


def test_the_verdict_is_on_the_unscaled_logits(digits_model, digits, make_task):
    task = make_task(digits_model, digits)
    plain, scaled = (
        PGD(PGDOptions(steps=1, step_size=Fraction(1, 10**6), start="x", logit_scale=scale)).evaluate(task, "pgd")
        for scale in (1.0, 1e-3)
    )
    natural = Natural(None).evaluate(task, "natural")
    assert plain.accuracy == scaled.accuracy == natural.accuracy


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_restarts_break_at_least_as_many_and_skip_the_broken(digits_model, digits, make_task):
    seen = []
    handle = digits_model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    try:
        task = make_task(digits_model, digits.subset(range(100)), batch_size=100)
        seen.clear()
        one = PGD(PGDOptions(steps=5)).evaluate(task, "pgd")
        once = list(seen)
        seen.clear()
        three = PGD(PGDOptions(steps=5, restarts=3)).evaluate(task, "pgd")
    finally:
        handle.remove()
    assert once == [100] * 6  # five gradients and a verdict
    assert three.accuracy <= one.accuracy
    survivors = round(100 * one.accuracy)
    assert seen[:12] == [100] * 6 + [survivors] * 6  # the sixth call judges each start


def test_the_first_start_is_the_same_however_many_follow(digits_model, digits, make_task):
    data = digits.subset(range(50))
    task = make_task(digits_model, data, threat=ThreatModel(eps=0.2, step_size=0.1))
    one, three = (
        PGD(PGDOptions(steps=3, restarts=restarts)).craft(task, data.x, data.y, torch.Generator().manual_seed(7))
        for restarts in (1, 3)
    )
    broken = digits_model(one).argmax(1) != data.y
    assert 0 < int(broken.sum()) < 50
    assert torch.equal(one[broken], three[broken])


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_noise_is_drawn_for_all_whoever_is_skipped(factor, make_task):
    # With factor 1 the example is broken at once, with -1 it never is; the stream must not know.
    noise = torch.Generator().manual_seed(3)
    task = make_task(Scripted(factor).eval(), ImageData(X, Y), num_classes=2)
    PGD(PGDOptions(steps=1, restarts=4)).craft(task, X, Y, noise)
    expected = torch.Generator().manual_seed(3)
    for _ in range(4):
        torch.empty(X.shape).uniform_(generator=expected)
    assert torch.equal(noise.get_state(), expected.get_state())


# --- what is reported -------------------------------------------------------------------------------------------------


def test_settings_say_how_to_make_the_examples_again(digits_model, digits, make_task):
    task = make_task(digits_model, digits.subset(range(10)), seed=3, threat=ThreatModel(eps="8/255", step_size="2/255"))
    assert CW(CWOptions()).evaluate(task, "cw20").settings == {
        "norm": "linf",
        "eps": "8/255",
        "attack": "cw",
        "step_size": "2/255",
        "steps": 20,
        "start": "uniform",
        "restarts": 1,
        "logit_scale": 1.0,
        "loss": "Carlini-Wagner margin",
        "kappa": 50.0,
        "seed": 3,
        "batch_size": 500,
    }


def test_a_subset_is_always_the_same_one_and_part_of_a_larger_one(digits_model, digits, make_task):
    task = make_task(digits_model, digits)

    def examples(count):
        narrow = PGD(PGDOptions(max_examples=count, batch_size=16)).narrow(task)
        assert narrow.batch_size == 16
        assert narrow.clean_correct.tolist() == (digits_model(narrow.data.x).argmax(1) == narrow.data.y).tolist()
        return {tuple(image.flatten().tolist()) for image in narrow.data.x}

    assert examples(40) == examples(40)
    assert examples(40) < examples(80)
    assert len(examples(359)) == len(examples(1000)) > 350  # two digits may be alike


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pgd", {"eps": 8}),
        ("cw", {"step_size": 2}),
        ("fgsm", {"norm": "l2"}),
        ("bim", {"restarts": 3}),
        ("pgd", {"steps": 0}),
        ("pgd", {"eps": -1}),
        ("pgd", {"logit_scale": 0}),
        ("cw", {"kappa": -1}),
        ("pgd", {"start": "uniforn"}),
        ("fgsm", {"max_examples": 0}),
    ],
)
def test_options_out_of_range_are_reported(name, options, snapshot):
    with snapshot.raises(OptionError, next(iter(options))):
        parse_options(
            ENTRIES[name].config,
            options,
            owner=name,
            fail=lambda at, reason: OptionError(f"{at[0]}: {reason}" if at else reason),
        )
    assert PGDOptions(norm="l2", eps=Fraction(3), step_size=Fraction(2)).threat(ThreatModel()).eps == 3  # a wide ball
