"""A model's tensors as a federation sees them: each once, also where the model has it under several names.

Two layers with one weight (``self.b.weight = self.a.weight``) have two entries in torch's state dict. An aggregator
would then treat one of them as a parameter and the other as a buffer. So messages, checkpoints and rules see a tensor
under its first name only, which is the name that ``named_parameters`` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from calfat_plugin.errors import ModelError, UpdateError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_ADVICE = (
    "Register one parameter under both names (self.b.weight = self.a.weight), or give each layer a copy: .clone()."
)


def further_names(model: nn.Module) -> dict[str, str]:
    """Each name in the state dict beyond a tensor's first, and that first name; empty where nothing is tied."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in _registered(model):
        names_of.setdefault(id(tensor), []).append(name)
    if all(len(names) == 1 for names in names_of.values()):
        return {}  # this is nearly always so, and a state dict takes longer
    stored = model.state_dict().keys()  # without buffers that are not persistent
    further: dict[str, str] = {}
    for names in names_of.values():
        names_stored = [name for name in names if name in stored]
        for name in names_stored[1:]:
            further[name] = names_stored[0]
    return further


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, each once, under its first name; they share memory with the model."""
    further = further_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in further}


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`state_of`: copy the values of ``state`` into the model, where tied tensors stay tied.

    Raises:
        ModelError: the model loads values in a way of its own that unties its tensors.
    """
    further = further_names(model)
    under_all_names = dict(state)
    for name, first_name in further.items():
        if first_name in state:
            under_all_names[name] = state[first_name]
    model.load_state_dict(under_all_names)
    untied = further.items() - further_names(model).items()
    if untied:
        name, first_name = min(untied)
        raise ModelError(
            f"model {type(model).__name__}: its tensors '{first_name}' and '{name}' are one, but after load_state_dict "
            "they are not. Let it copy values into the tensors that are there, as torch's own load_state_dict does."
        )


def each_once(state: Mapping[str, Tensor], model: nn.Module, *, who: str) -> dict[str, Tensor]:
    """A state dict as torch, or somebody else's code, makes it, in the form of :func:`state_of`.

    A tied tensor may be there under all its names or under any one of them. Names that the model does not have stay:
    the checks that follow refuse them.

    Raises:
        UpdateError: two names of one tensor have different values; ``who``: whose state it is, as the text begins.
    """
    further = further_names(model)
    once = {name: tensor for name, tensor in state.items() if name not in further}
    for name, first_name in further.items():
        if name not in state:
            continue
        value = once.setdefault(first_name, state[name])
        if not _same(value, state[name]):
            raise UpdateError(
                f"{who}: '{first_name}' and '{name}' are one tensor of the model and must have the same values, but "
                "they differ"
            )
    return once


def _same(value: object, other: object) -> bool:
    """Whether two values of a state are equal; a nan equals a nan, so that it is refused as one."""
    import torch

    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return value is other
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return bool(((value == other) | (value.isnan() & other.isnan())).all())


def refuse_overlaps(model: nn.Module, who: str) -> None:
    """Refuse tensors that share memory without being one: a slice of another, a transposed or detached view.

    Each would be sent and aggregated by itself, and loading one would overwrite a part of the other. On a GPU they
    would not even be shared, for ``model.to`` copies each of them.

    Raises:
        ModelError: there are such tensors; ``who``: the model, as the text begins.
    """
    stored = model.state_dict().keys()
    spans: dict[int, tuple[int, int, str]] = {}  # of each tensor its first and last address and its name
    for name, tensor in _registered(model):
        if name not in stored or id(tensor) in spans or not tensor.numel() or tensor.device.type == "meta":
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        spans[id(tensor)] = (start, start + last * tensor.element_size(), name)
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ModelError(f"{who}: elements of its tensor '{name}' share memory (it was expanded). Add .clone().")
    for (_, end, name), (start, _, other) in pairwise(sorted(spans.values())):
        if start <= end:
            raise ModelError(f"{who}: its tensors '{name}' and '{other}' share memory, but are not one. {_ADVICE}")


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """``model.to(device)``, after which tied buffers are tied again: torch copies them once for each of their names."""
    further = further_names(model)
    model.to(device)
    for name, first_name in further.items():
        layer, _, key = name.rpartition(".")
        first_layer, _, first_key = first_name.rpartition(".")
        buffers = model.get_submodule(layer)._buffers
        if key in buffers:
            buffers[key] = getattr(model.get_submodule(first_layer), first_key)
    return model


def _registered(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All (name, tensor) of parameters, then of buffers, under every name."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]
