"""What travels between parties: one flat mapping from name to tensor, readable without pickle.

Model tensors keep their ``state_dict`` names, which never contain a slash. Everything else stands under a namespaced
name: ``metric/loss`` for numbers, ``refused/reason`` for a client that has no update to give, and whatever aggregator
or method adds (``scaffold/c/conv.weight``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.errors import UpdateError
from calfat_plugin.results import LocalUpdate

if TYPE_CHECKING:
    from torch import Tensor

Wire = OrderedDict[str, "Tensor"]  # an OrderedDict, because the host takes a plain dict for a map per client

_METRIC = "metric/"
_REFUSED = "refused/reason"
_MAX_REASON = 10_000  # bytes


@dataclass(frozen=True)
class Downlink:
    """What a client receives: the global model and the extras of aggregator and method."""

    state: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]


def pack_downlink(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> Wire:
    """One mapping for the host to send. Tensors are not copied."""
    _check_namespaces(state, extras)
    return OrderedDict({**state, **extras})


def unpack_downlink(wire: Mapping[str, Tensor]) -> Downlink:
    """The inverse of :func:`pack_downlink`."""
    return Downlink(
        state={name: tensor for name, tensor in wire.items() if "/" not in name},
        extras={name: tensor for name, tensor in wire.items() if "/" in name},
    )


def pack_update(update: LocalUpdate) -> Wire:
    """One mapping for the host to send. ``client_state`` stays behind: it never leaves the client."""
    import torch

    _check_namespaces(update.state, update.extras)
    metrics = {_METRIC + name: torch.tensor(value, dtype=torch.float64) for name, value in update.metrics.items()}
    return OrderedDict({**update.state, **update.extras, **metrics})


def pack_refusal(reason: str) -> Wire:
    """What a client sends that has no update to give."""
    import torch

    return OrderedDict({_REFUSED: torch.tensor(list(reason.encode()), dtype=torch.uint8)})


def unpack_update(wire: Mapping[str, Tensor], num_examples: int) -> LocalUpdate:
    """The inverse of :func:`pack_update`.

    Raises:
        UpdateError: with the client's own reason, when it sent a refusal.
    """
    if _REFUSED in wire:
        raise UpdateError(bytes(wire[_REFUSED].tolist()).decode(errors="replace"))
    state: dict[str, Tensor] = {}
    extras: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    for name, tensor in wire.items():
        if name.startswith(_METRIC):
            metrics[name.removeprefix(_METRIC)] = float(tensor)
        else:
            (extras if "/" in name else state)[name] = tensor
    return LocalUpdate(state=state, num_examples=num_examples, extras=extras, metrics=metrics)


def check_upload(wire: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, who: str) -> Wire:
    """Check everything in a client's message that is not the model's own, before anything reads it.

    Args:
        wire: what arrived.
        reference: the global model.
        who: the sender as the user knows it, such as ``client 3``.

    Returns:
        The message; of a client that has no update to give, its reason alone.

    Raises:
        UpdateError: a metric that is no finite number, an extra that holds nan or inf, or that does not have the shape
            of the model's tensor it is named after.
    """
    reason = wire.get(_REFUSED)
    if reason is not None:
        if str(reason.dtype) != "torch.uint8" or reason.ndim != 1 or len(reason) > _MAX_REASON:
            raise UpdateError(f"{who}: has no update to give, and no readable reason")
        return OrderedDict({_REFUSED: reason})
    for name, tensor in wire.items():
        if "/" not in name:
            continue  # the aggregation compares these with the model
        if not tensor.isfinite().all():
            raise UpdateError(f"{who}: '{name}' holds nan or inf")
        if name.startswith(_METRIC) and tensor.numel() != 1:
            raise UpdateError(f"{who}: '{name}' holds {tensor.numel()} values, expected one number")
        wanted = reference.get(name.rpartition("/")[2])
        if wanted is not None and tensor.shape != wanted.shape:
            raise UpdateError(f"{who}: '{name}' has shape {tuple(tensor.shape)}, expected {tuple(wanted.shape)}")
    return OrderedDict(wire)


def num_bytes(wire: Mapping[str, Tensor]) -> int:
    """Payload of a message in bytes, framing not counted."""
    return sum(tensor.numel() * tensor.element_size() for tensor in wire.values())


def _check_namespaces(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
    wrong = [name for name in state if "/" in name] + [name for name in extras if "/" not in name]
    if wrong:
        raise UpdateError(
            f"the tensor '{wrong[0]}' is misnamed: model tensors have no '/' in their name, extras begin with a "
            "namespace such as 'scaffold/'."
        )
