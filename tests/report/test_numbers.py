"""Numbers in words, as pages, the console and tables have them."""

from __future__ import annotations

from calfat_plugin.report.numbers import (
    bare_percent,
    counted,
    duration,
    figure,
    percent,
    points,
    signed,
    unbroken_percent,
)


def test_percent() -> None:
    assert [percent(x) for x in (0.0, 0.83424, 1.0)] == ["0.0 %", "83.4 %", "100.0 %"]
    assert unbroken_percent(0.83424) == "83.4\N{NO-BREAK SPACE}%"
    assert [bare_percent(0.83424), bare_percent(None)] == ["83.42", "\N{EN DASH}"]


def test_differences_have_a_sign() -> None:
    assert [points(x) for x in (0.0031, -0.1)] == ["+0.31", "-10.00"]
    assert [signed(points(x)) for x in (0.0031, -0.1)] == ["+0.31", "\N{MINUS SIGN}10.00"]
    assert signed("[-1, 2]") == "[\N{MINUS SIGN}1, 2]"
    for text in ("0-4, 7", "1e-05", "T-shirt", "2026-01-01"):  # none of these is a negative number
        assert signed(text) == text


def test_measured_numbers_are_read_without_powers_of_ten() -> None:
    numbers = (5.4e6, -12345.6, 999.96, 0.012345, 0.0, 2.5e-7, 1e20, float("nan"))
    assert [*map(figure, numbers)] == ["5,400,000", "-12,346", "1,000", "0.01235", "0", "2.5e-07", "1e+20", "nan"]


def test_durations_and_counts() -> None:
    assert [duration(x) for x in (7.25, 75, 3725)] == ["7.2 s", "1 min 15 s", "1 h 2 min"]
    assert [counted(x, "client") for x in (0, 1, 1200)] == ["0 clients", "1 client", "1,200 clients"]
