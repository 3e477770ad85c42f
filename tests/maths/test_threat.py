from __future__ import annotations

import copy
import math
import pickle
import re
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.errors import BudgetError, OptionError
from calfat_plugin.exact import StepSize, exact_text, parse_number
from calfat_plugin.options import OptionInfo
from calfat_plugin.threat import Bounds, ThreatModel

FEW = settings(max_examples=40, deadline=None, derandomize=True)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "exact"),
        [
            ("8/255", Fraction(8, 255)),
            (" 8 / 255 ", Fraction(8, 255)),
            (8 / 255, Fraction(8, 255)),
            ("1e-3", Fraction(1, 1000)),
            ("2.0e-3", Fraction(1, 500)),
            (0.1, Fraction(1, 10)),
            (0.031, Fraction(31, 1000)),
            (1e-5, Fraction(1, 100_000)),
            (".5", Fraction(1, 2)),
            ("-0.5", Fraction(-1, 2)),
            (3, Fraction(3)),
            (Fraction(2, 255), Fraction(2, 255)),
        ],
    )
    def test_reads_what_people_write(self, value, exact):
        assert parse_number(value) == exact

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("8 / 0", "'8 / 0' divides by zero"),
            ("eight", "'eight' is not a number; write 8/255, 0.1 or 1e-3"),
            ("", "'' is not a number; write 8/255, 0.1 or 1e-3"),
            ("nan", "'nan' is not a number; write 8/255, 0.1 or 1e-3"),
            ("1/2/3", "'1/2/3' is not a number; write 8/255, 0.1 or 1e-3"),
            ("1e999999999", "'1e999999999' is not a number; write 8/255, 0.1 or 1e-3"),
            ("1e999", "'1e999' is too large for a float"),
            ("1e300/1e-300", "'1e300/1e-300' is too large for a float"),
            (10**400, "a number of 1329 bits is too large for a float"),
            (True, "True is not a number; write 8/255, 0.1 or 1e-3"),
            (None, "None is not a number; write 8/255, 0.1 or 1e-3"),
            (math.nan, "nan is not a finite number"),
            (math.inf, "inf is not a finite number"),
        ],
    )
    def test_refuses_the_rest(self, value, text):
        for read in (parse_number, exact_text):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                read(value)

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (Fraction(8, 255), "8/255"),
            (8 / 255, "8/255"),
            (0.1, "0.1"),
            (0.002, "0.002"),
            (Fraction(51, 255), "0.2"),
            (1.0, "1"),
            (0, "0"),
            (1e-7, "1e-07"),
        ],
    )
    def test_writes_what_people_read(self, value, text):
        assert exact_text(value) == text

    @FEW
    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_floats_survive_exactly(self, value):
        assert float(parse_number(value)) == value
        assert parse_number(exact_text(value)) == parse_number(value)

    @FEW
    @given(st.fractions(-(10**6), 10**6, max_denominator=10**6))
    def test_fractions_survive_exactly(self, value):
        assert parse_number(exact_text(value)) == value


class TestStepSize:
    @pytest.mark.parametrize(
        ("value", "factor", "text"),
        [
            ("eps", Fraction(1), "eps"),
            ("eps/4", Fraction(1, 4), "eps/4"),
            (" 0.25 eps ", Fraction(1, 4), "eps/4"),
            ("1/4eps", Fraction(1, 4), "eps/4"),
            ("2/3 eps", Fraction(2, 3), "2/3 eps"),
            ("2 eps / 3", Fraction(2, 3), "2/3 eps"),
            ("1.25 eps", Fraction(5, 4), "1.25 eps"),
            ("1e-1 eps", Fraction(1, 10), "eps/10"),
        ],
    )
    def test_a_multiple_of_eps(self, value, factor, text):
        step = StepSize(value, Fraction(1, 10))
        assert (step, step.factor, step.text, exact_text(step)) == (factor / 10, factor, text, exact_text(factor / 10))
        for copied in (StepSize(step.text, Fraction(1, 10)), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
            assert (copied, copied.factor) == (step, factor)

    @pytest.mark.parametrize("value", ["2/255", 2 / 255, Fraction(2, 255)])
    def test_a_length_of_its_own(self, value):
        step = StepSize(value, Fraction(1, 10))
        assert (step, step.factor, step.text) == (Fraction(2, 255), None, "2/255")
        assert pickle.loads(pickle.dumps(step)).factor is None

    @pytest.mark.parametrize("value", ["eps/0", "eps 4", "eps*4", "1 eps 5", "eps/8/255", "4/eps", "x eps", "eps eps"])
    def test_what_is_neither(self, value):
        with pytest.raises(ValueError, match=f"^'{re.escape(value)}' is no multiple of eps; write eps/4 or 0.25 eps$"):
            StepSize(value)

    def test_it_follows_eps_through_every_copy(self):
        threat = ThreatModel(eps="0.1")
        for other, step in (
            (threat, "0.025"),
            (replace(threat, eps="0.3"), "0.075"),
            (replace(replace(threat, eps=0), eps="8/255"), "2/255"),
            (replace(threat, eps="0.3", step_size="0.025"), "0.025"),
            (replace(ThreatModel(eps="0.1", step_size="0.025"), eps="0.3"), "0.025"),
        ):
            assert exact_text(other.step_size) == step

    @pytest.mark.parametrize(
        ("budget", "problem"),
        [
            ({}, ""),
            ({"eps": 0.3}, ""),
            ({"steps": 4}, ""),
            ({"steps": 1, "step_size": "eps"}, ""),
            ({"norm": "l1", "eps": 12}, ""),
            ({"eps": 0, "step_size": 0.1}, ""),
            ({"eps": 0.3, "step_size": 0.025}, "steps x step_size"),
            ({"norm": "l2", "eps": 3, "step_size": 1, "steps": 2}, "steps x step_size"),
            ({"eps": 0.01, "step_size": 0.025}, "step_size"),
            ({"eps": 0.1, "step_size": "1.25 eps"}, "step_size"),
        ],
    )
    def test_steps_that_do_not_fit_eps(self, budget, problem, snapshot):
        found = ThreatModel(**budget).step_problem()
        assert (found == "") == (problem == "")
        assert found.startswith(problem)
        if problem:
            snapshot(found)


class TestThreatModel:
    def test_default_is_the_papers(self):
        threat = ThreatModel()
        assert (threat.norm, threat.eps, threat.step_size, threat.steps, threat.bounds) == (
            "linf",
            Fraction(8, 255),
            Fraction(2, 255),
            10,
            (0.0, 1.0),
        )

    def test_numbers_become_exact_and_equal(self):
        assert ThreatModel(eps="8/255", step_size=2 / 255) == ThreatModel()
        assert ThreatModel(eps=8 / 255).eps == Fraction(8, 255)

    def test_what_was_parsed_is_not_parsed_again(self, monkeypatch):
        threat = ThreatModel(eps="0.1")

        def parse(info, value):
            raise AssertionError(f"{info.name} = {value!r} is parsed again")

        monkeypatch.setattr(OptionInfo, "parse", parse)
        other = replace(threat, eps=Fraction(1, 5), steps=3, norm="l2")
        assert (other.norm, other.eps, other.step_size, other.steps) == ("l2", Fraction(1, 5), Fraction(1, 20), 3)

    @pytest.mark.parametrize(
        "options",
        [
            {"eps": Fraction(-1, 255)},
            {"eps": Fraction(2)},
            {"step_size": Fraction(0)},
            {"step_size": StepSize("0 eps")},
            {"steps": 0},
            {"norm": "max"},
        ],
    )
    def test_what_has_the_type_is_still_held_to_its_range(self, options):
        (name,) = options
        with pytest.raises(OptionError, match=f"^{name}"):
            ThreatModel(**options)

    def test_l2_radius_may_exceed_the_pixel_range(self):
        assert ThreatModel(norm="l2", eps=3).eps == 3

    @pytest.mark.parametrize(("norm", "most"), [("l2", 10_000), ("l1", 100_000_000)])
    def test_a_radius_is_no_longer_than_any_image(self, norm, most):
        assert ThreatModel(norm=norm, eps=most).eps == most
        with pytest.raises(OptionError) as caught:
            ThreatModel(norm=norm, eps=most + 1)
        assert str(caught.value) == f"eps is longer than any image, at most {most} pixel ranges; got {most + 1}"

    @pytest.mark.parametrize(
        "options",
        [
            {"eps": 8},
            {"step_size": "2"},
            {"eps": "-1/255"},
            {"step_size": 0},
            {"step_size": "0 eps"},
            {"step_size": "32 eps"},
            {"step_size": "eps/x"},
            {"eps": "much"},
            {"steps": 0},
            {"steps": True},
            {"steps": 2.5},
            {"norm": "Linf"},
            {"norm": 2},
            {"norm": "max"},
            {"bounds": (1, 0)},
            {"bounds": 1},
            {"bounds": (0, "x")},
        ],
    )
    def test_refuses_with_the_whole_reason(self, options, snapshot):
        with snapshot.raises(OptionError, next(iter(options))):
            ThreatModel(**options)


def threats(norm: str):
    eps = st.floats(0, 1) if norm == "linf" else st.floats(0, 20)
    return st.builds(lambda e, s: ThreatModel(norm=norm, eps=e, step_size=s), eps, st.floats(1e-4, 1))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
class TestBall:
    @FEW
    @given(data=st.data(), seed=st.integers(0, 10**6))
    def test_starts_and_projections_stay_inside(self, norm, data, seed):
        threat, generator = data.draw(threats(norm)), seeded(seed)
        x = torch.rand(3, 2, 4, 4, generator=generator).round(decimals=1)  # some pixels at 0 and 1
        far = x + 5 * torch.randn(x.shape, generator=generator)
        for x_adv in (threat.random_start(x, generator), threat.project(far, x)):
            threat.check(x_adv, x, who="test")
            assert (x_adv.shape, x_adv.dtype) == (x.shape, x.dtype)

    @FEW
    @given(data=st.data(), seed=st.integers(0, 10**6))
    def test_projection_is_idempotent_and_leaves_inner_points(self, norm, data, seed):
        threat, generator = data.draw(threats(norm)), seeded(seed)
        x = torch.rand(3, 2, 4, 4, generator=generator)
        inner = threat.random_start(x, generator)
        assert torch.allclose(threat.project(inner, x), inner, atol=2e-6)
        assert torch.equal(threat.project(x, x), x)

    def test_never_changes_or_shares_its_inputs(self, norm):
        threat, x = ThreatModel(norm=norm, eps=0.5), torch.rand(2, 1, 2, 2, generator=seeded())
        before = x.clone()
        projected = threat.project(x, x)
        projected += 1
        assert torch.equal(x, before)

    def test_start_is_reproducible_and_independent_of_memory_layout(self, norm):
        threat, x = ThreatModel(norm=norm, eps=0.5), torch.rand(2, 3, 4, 4, generator=seeded())
        last = x.contiguous(memory_format=torch.channels_last)
        assert torch.equal(threat.random_start(x, seeded(1)), threat.random_start(last, seeded(1)))
        assert not torch.equal(threat.random_start(x, seeded(1)), threat.random_start(x, seeded(2)))

    def test_empty_batch(self, norm):
        threat, x = ThreatModel(norm=norm), torch.empty(0, 1, 2, 2)
        threat.check(threat.random_start(x, seeded()), x, who="test")

    def test_eps_zero_gives_x_back(self, norm):
        threat, x = ThreatModel(norm=norm, eps=0), torch.rand(2, 1, 3, 3, generator=seeded())
        assert torch.equal(threat.project(x + 1, x), x)


class TestMoves:
    def test_linf_start_is_uniform(self):
        threat, x = ThreatModel(eps=0.1), torch.full((1000, 10), 0.5)
        noise = (threat.random_start(x, seeded()) - x) / 0.1
        assert noise.mean().item() == pytest.approx(0, abs=0.02)
        assert noise.var().item() == pytest.approx(1 / 3, abs=0.01)

    def test_l2_start_fills_the_ball_evenly(self):
        # In d dimensions half the volume lies within 0.5 ** (1/d) of the radius.
        threat, x = ThreatModel(norm="l2", eps=0.4), torch.full((4000, 3), 0.5)
        share = (threat.distance(threat.random_start(x, seeded()), x) < 0.4 * 0.5 ** (1 / 3)).float()
        assert share.mean().item() == pytest.approx(0.5, abs=0.03)

    def test_gaussian_start_is_not_projected(self):
        threat, x = ThreatModel(), torch.zeros(100, 10)
        start = threat.gaussian_start(x, seeded(), std=1e-3)
        assert start.min() < 0  # below the pixel range: the first projection mends it
        assert torch.equal(start, x + 1e-3 * torch.randn(x.shape, generator=seeded()))

    def test_linf_step(self):
        grad = torch.tensor([[3.0, -1e-20, 0.0]])
        moved = ThreatModel().ascend(torch.zeros(1, 3), grad, 0.25)
        assert moved.tolist() == [[0.25, -0.25, 0.0]]

    @pytest.mark.parametrize("size", [1.0, 1e-25])
    def test_l2_step_has_the_step_size_however_small_the_gradient(self, size):
        grad = size * torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        moved = ThreatModel(norm="l2").ascend(torch.zeros(2, 2), grad, 0.5)
        assert moved.flatten().tolist() == pytest.approx([0.3, 0.4, 0.0, 0.0])

    def test_distance(self):
        x, x_adv = torch.zeros(1, 1, 1, 2), torch.tensor([[[[3.0, -4.0]]]])
        assert ThreatModel().distance(x_adv, x).tolist() == [4.0]
        assert ThreatModel(norm="l2").distance(x_adv, x).tolist() == [5.0]
        assert ThreatModel(norm="l1").distance(x_adv, x).tolist() == [7.0]

    def test_bounds_other_than_unit(self):
        threat = ThreatModel(eps=1, bounds=Bounds(-1.0, 1.0))
        assert threat.project(torch.tensor([[-9.0, 9.0]]), torch.zeros(1, 2)).tolist() == [[-1, 1]]


class TestCheck:
    X = torch.full((3, 2), 0.5)

    def refusal(self, x_adv: torch.Tensor, **options: object) -> str:
        with pytest.raises(BudgetError) as caught:
            ThreatModel(**options).check(x_adv, self.X, who="my-attack")
        return str(caught.value)

    @pytest.mark.parametrize(
        ("norm", "eps", "change"),
        [
            ("linf", 0.125, [[0.0, 0.0], [0.25, 0.0], [0.0, -0.375]]),
            ("l2", 0.4, [[0.3, 0.4], [0.0, 0.0], [0.0, 0.0]]),  # counts the whole image, as l1 does
            ("l1", 0.6, [[0.3, -0.4], [0.0, 0.0], [0.0, 0.0]]),
            ("linf", 1, [[0.0, 0.75], [0.0, 0.0], [0.0, 0.0]]),  # outside the pixel range
        ],
    )
    def test_outside(self, norm, eps, change, snapshot):
        snapshot(self.refusal(self.X + torch.tensor(change), norm=norm, eps=eps))

    @pytest.mark.parametrize(("excess", "refused"), [(3e-5, False), (1e-4, True)])
    def test_in_l1_the_rounding_of_every_value_is_allowed(self, excess, refused):
        x = torch.full((1, 3, 32, 32), 0.25)
        x_adv = x.clone()
        x_adv[0, 0, 0, 0] += 0.5 + excess
        with pytest.raises(BudgetError) if refused else nullcontext():
            ThreatModel("l1", 0.5).check(x_adv, x, who="my-attack")

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_not_finite(self, value):
        x_adv = self.X.clone()
        x_adv[1, 0] = value
        assert self.refusal(x_adv) == ("my-attack: 1 of 3 adversarial examples hold nan or inf; the first is example 1")

    def test_another_shape(self, snapshot):
        snapshot(self.refusal(torch.zeros(3, 1)))

    def test_rounding_is_allowed(self):
        ThreatModel(eps=0.125).check(self.X + 0.125 + 5e-7, self.X, who="my-attack")
