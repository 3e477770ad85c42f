"""What fails only when a run starts is reported with file, line and key, as if the check had found it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calfat_plugin.errors import CalfatError, DataError, ModelError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from tests.snapshot import TextSnapshot

RECIPE = """\
data_args:
  partition_method: iid
model_args:
  model: cnn
calfat: {}
"""
NOTHING: Any = SimpleNamespace(adapt_model=lambda model: model)


def experiment(*overrides: str) -> Experiment:
    return assemble(parse_document(RECIPE, "r.yaml").with_overrides(overrides), Registry.load(entry_points=False))


def images(side: int) -> Any:
    return SimpleNamespace(in_channels=1, image_size=(side, side), num_classes=2)


def test_a_partition_that_cannot_be(snapshot: TextSnapshot) -> None:
    with snapshot.raises(DataError):
        experiment().split(np.zeros(3, dtype=np.int64))


def test_a_long_tail_that_cannot_be_dealt_out() -> None:
    """It is called what the recipe calls it, by the place of the key."""
    tail = "data_args.partition_method=longtail"
    with pytest.raises(DataError) as raised:
        experiment(tail, "data_args.partition_alpha=1.0e-9", "calfat.partition={max_tries: 2, imbalance: 25}").split(
            np.repeat([0, 1], 50)
        )
    assert str(raised.value).startswith(
        f"--set {tail}: data_args.partition_method: no split in 2 tries gave each of 5 "
        "clients 1 of the 52 examples that imbalance 25 leaves (alpha 1e-09, "
    )
    assert "dirichlet" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "place"), [((), "r.yaml:4"), (("model_args.model=vgg8",), "--set model_args.model=vgg8")]
)
def test_a_model_that_cannot_be_built(overrides: tuple[str, ...], place: str) -> None:
    with pytest.raises(ModelError) as raised:
        experiment(*overrides).build_model(images(7), NOTHING)
    assert str(raised.value).startswith(f"{place}: model_args.model: model ")


def test_a_factory_of_ones_own_that_is_not_there() -> None:
    with pytest.raises(CalfatError) as raised:
        experiment("model_args.model=nowhere:build").build_model(images(32), NOTHING)
    assert str(raised.value).startswith(
        "--set model_args.model=nowhere:build: model_args.model: model nowhere:build: module nowhere cannot be imported"
    )
