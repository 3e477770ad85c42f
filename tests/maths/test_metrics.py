from __future__ import annotations

import pytest

from calfat_plugin.maths.metrics import mean_std


def test_mean_std():
    assert mean_std([2.0, 4.0, 9.0]) == pytest.approx((5.0, 13**0.5))
    assert mean_std([0.3]) == (0.3, None)
    with pytest.raises(ValueError, match=r"^no values to average$"):
        mean_std([])
