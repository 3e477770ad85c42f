"""The worst class and the worst clients, by hand."""

from __future__ import annotations

import pytest

from calfat_plugin.maths.metrics import Worst, worst_class, worst_clients


def test_the_worst_class_is_the_first_of_equals_and_has_examples() -> None:
    assert worst_class((None, 0.5, 0.25, 0.25)) == Worst(0.25, (2,))
    assert worst_class((None, None)) is None
    assert worst_class(()) is None


def test_a_clients_accuracy_weights_classes_as_its_training_examples() -> None:
    """3/4 of 0.2 and 1/4 of 0.6 is 0.3; the other client has 0.5."""
    assert worst_clients((0.2, 0.6), [[10, 30], [30, 10]]) == Worst(pytest.approx(0.3), (1,))  # type: ignore[arg-type]


def test_classes_without_test_examples_and_clients_without_others_are_left_out() -> None:
    assert worst_clients((0.5, None), [[1, 99], [0, 7], [0, 0]]) == Worst(0.5, (0,))
    assert worst_clients((None, None), [[1, 1]]) is None


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (30, 3), (100, 10), (101, 11)])
def test_ten_percent_of_the_clients_are_rounded_up(clients: int, worst: int) -> None:
    """Client k has k : K - k examples of a class that is always right and one that is never."""
    found = worst_clients((1.0, 0.0), [[k, clients - k] for k in range(clients)])
    assert found is not None
    assert found.ids == tuple(range(worst))
    assert found.accuracy == pytest.approx(sum(range(worst)) / worst / clients)


def test_nothing_is_made_up_where_classes_or_clients_are_not_known() -> None:
    assert worst_clients((0.5, 0.5), []) is None
    assert worst_clients((), [[1, 2]]) is None
    assert worst_clients((0.5,), [[1, 2]]) is None
