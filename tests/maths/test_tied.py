"""A model's tensors, each once: names, loading, other people's state dicts, shared memory, devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import calfat_plugin
from calfat_plugin.errors import ModelError, UpdateError
from calfat_plugin.maths.tied import each_once, further_names, load_state, moved, refuse_overlaps, state_of
from tests.methods.tied_models import Tied

FURTHER = {
    "again.weight": "conv.weight",
    "b.weight": "a.weight",
    **{
        f"again_norm.{n}": f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    },
}


def tied() -> Tied:
    return Tied(1, (4, 4), 4)


def two_norms() -> nn.Sequential:
    """Two normalisations of their own weights and one running mean; the second name of a parameter is a buffer."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    model[1].register_buffer("scale", model[0].weight)
    return model


def test_a_tensor_has_the_name_under_which_it_is_registered_first() -> None:
    model = tied()
    assert further_names(model) == FURTHER
    assert list(state_of(model)) == [name for name in model.state_dict() if name not in FURTHER]
    assert set(dict(model.named_parameters())) <= set(state_of(model))
    assert further_names(two_norms()) == {"1.running_mean": "0.running_mean", "1.scale": "0.weight"}
    assert further_names(nn.Linear(2, 2)) == {}


def test_a_parameter_goes_before_a_buffer_that_is_registered_before_it() -> None:
    model = nn.Module()
    layer = nn.Linear(2, 2)
    model.register_buffer("copy", layer.weight)
    model.layer = layer
    assert further_names(model) == {"copy": "layer.weight"}


def test_a_buffer_that_is_not_stored_takes_no_name_away() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    shared = torch.ones(2)
    model[0].register_buffer("hidden", shared, persistent=False)
    model[1].register_buffer("stored", shared)
    assert "1.stored" in state_of(model)


PLACES = {  # that read or load a state dict of torch's, with the reason
    "maths/tied.py": "what the others call",
    "experiment/checked.py": "personal names may be any of a tensor's",
    "runs/loaded_run.py": "messages say how to save one",
    "models/networks.py": "from a network to its copy",
    "trainers/fedrbn.py": "names of one layer; and a few statistics that are loaded",
    "testing/federation.py": "of TinyModel, where nothing is tied",
    "testing/inputs.py": "also checks that it holds tensors",
    "testing/trainers.py": "writes over each tensor",
}


def test_nobody_else_reads_or_loads_a_state_dict() -> None:
    package = Path(calfat_plugin.__file__).parent
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if re.search(r"\.(load_)?state_dict\(", file.read_text(encoding="utf-8"))
    }
    assert found == set(PLACES)


def test_tied_tensors_are_tied_after_loading() -> None:
    model, other = tied(), tied()
    load_state(other, state_of(model))
    assert other.b.weight is other.a.weight
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    load_state(model, {name: tensor + 1 for name, tensor in state_of(model).items()})
    assert torch.equal(model.b.weight, other.a.weight + 1)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_state(model, {name: tensor for name, tensor in state_of(model).items() if name != "a.weight"})


class Unties(Tied):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.b.weight = nn.Parameter(state["b.weight"].clone())
        return super().load_state_dict(state, strict, assign)


def test_a_model_that_unties_its_tensors_in_loading_is_refused() -> None:
    model = Unties(1, (4, 4), 4)
    with pytest.raises(
        ModelError, match=r"model Unties: its tensors 'a\.weight' and 'b\.weight' are one, but after load_state_dict"
    ):
        load_state(model, state_of(model))


def test_a_state_dict_of_torch_is_taken_whatever_names_it_has() -> None:
    model = tied()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for left_out in ((), ("b.weight",), ("a.weight",)):
        given = {name: tensor for name, tensor in stored.items() if name not in left_out}
        once = each_once(given, model, who="x")
        assert once.keys() == state_of(model).keys()
        assert all(torch.equal(once[name], tensor) for name, tensor in state_of(model).items())
    nan = torch.full_like(stored["a.weight"], torch.nan)
    each_once({**stored, "a.weight": nan, "b.weight": nan.clone()}, model, who="x")  # refused later, as nan


@pytest.mark.parametrize("other", [torch.zeros(16, 16), torch.zeros(2), "text"])
def test_two_values_for_one_tensor_are_refused(other: Any) -> None:
    model = Tied(1, (2, 2), 4)
    with pytest.raises(UpdateError, match=r"^x: 'a\.weight' and 'b\.weight' are one tensor of the model"):
        each_once({**model.state_dict(), "b.weight": other}, model, who="x")


def with_weight(make: Callable[[nn.Linear], torch.Tensor]) -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(make(first))
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda first: first.weight.data, id="the same memory"),
        pytest.param(lambda first: first.weight.data.t(), id="transposed"),
        pytest.param(lambda first: first.weight.data[1:3], id="a slice"),
        pytest.param(lambda first: first.bias.data.as_strided((1,), (1,), 3), id="the last element"),
    ],
)
def test_tensors_that_overlap_are_refused(make: Any) -> None:
    with pytest.raises(
        ModelError, match=r"^model x: its tensors '0\.\w+' and '1\.weight' share memory, but are not one"
    ):
        refuse_overlaps(with_weight(make), "model x")


def test_a_buffer_that_views_a_parameter_and_one_that_is_expanded_are_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("first_row", layer.weight.detach()[0])
    with pytest.raises(ModelError, match="'first_row' and 'weight' share memory"):
        refuse_overlaps(layer, "model x")
    layer = nn.Linear(4, 4)
    layer.register_buffer("ones", torch.ones(1).expand(4))
    with pytest.raises(ModelError, match="elements of its tensor 'ones' share memory"):
        refuse_overlaps(layer, "model x")


def test_tied_tensors_and_neighbours_in_memory_are_none_that_overlap() -> None:
    refuse_overlaps(tied(), "model x")
    refuse_overlaps(two_norms(), "model x")
    whole = torch.zeros(24)
    pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    pair[0].weight, pair[1].weight = nn.Parameter(whole[:16].view(4, 4)), nn.Parameter(whole[16:].view(2, 4))
    refuse_overlaps(pair, "model x")  # as a recurrent layer's weights on a GPU


def test_tied_buffers_are_tied_on_another_device() -> None:
    model = moved(two_norms(), torch.device("meta"))
    assert model[1].running_mean is model[0].running_mean
    assert model[1].scale is model[0].weight
    assert model[1].running_var is not model[0].running_var
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
