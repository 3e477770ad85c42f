from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.maths.metrics import Counts, mean_std

Y = torch.tensor([0, 0, 1, 1, 1, 3])
CLEAN = torch.tensor([True, False, True, True, False, False])
ADV = torch.tensor([True, True, False, True, False, True])
COUNTS = Counts.from_verdicts(CLEAN, Y, 4, ADV)


def test_the_three_accuracies():
    assert COUNTS.num_examples == 6
    assert COUNTS.natural_acc == pytest.approx(3 / 6)
    assert COUNTS.robust_acc == pytest.approx(4 / 6)  # release: above natural is possible
    assert COUNTS.robust_acc_strict == pytest.approx(2 / 6)


def test_per_class_with_an_absent_class():
    assert COUNTS.natural_per_class == pytest.approx((1 / 2, 2 / 3, None, 0.0))
    assert COUNTS.robust_per_class == pytest.approx((1.0, 1 / 3, None, 1.0))
    assert COUNTS.robust_per_class_strict == pytest.approx((1 / 2, 1 / 3, None, 0.0))


def test_verdicts_may_be_numbers():
    assert Counts.from_verdicts(CLEAN.long(), Y, 4, ADV.float()) == COUNTS


def test_nothing_attacked():
    counts = Counts.from_verdicts(CLEAN, Y, 4)
    assert counts.natural_acc == 0.5
    assert (counts.robust_acc, counts.robust_acc_strict) == (None, None)
    assert (counts.robust_per_class, counts.robust_per_class_strict) == (None, None)


def test_nothing_counted():
    none = torch.zeros(0, dtype=torch.bool)
    counts = Counts.from_verdicts(none, none.long(), 2, none)
    assert (counts.natural_acc, counts.robust_acc, counts.robust_acc_strict) == (None, None, None)
    assert counts.natural_per_class == (None, None)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 10**6))
def test_batches_add_up_and_strict_never_exceeds_either(size, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (size,), generator=generator)
    clean, adv = (torch.rand(2, size, generator=generator) < 0.5).unbind()
    whole = Counts.from_verdicts(clean, y, 5, adv)
    parts = [Counts.from_verdicts(clean[part], y[part], 5, adv[part]) for part in (slice(0, cut), slice(cut, None))]
    assert parts[0] + parts[1] == whole
    assert whole.robust_acc_strict <= min(whole.natural_acc, whole.robust_acc)


def test_adding_a_clean_count_leaves_no_robust_one():
    total = COUNTS + Counts.from_verdicts(CLEAN, Y, 4)
    assert total.robust_acc is None
    assert total.natural_acc == 0.5


def test_mean_std():
    assert mean_std([2.0, 4.0, 9.0]) == pytest.approx((5.0, 13**0.5))
    assert mean_std([0.3]) == (0.3, None)
    with pytest.raises(ValueError, match=r"^no values to average$"):
        mean_std([])
