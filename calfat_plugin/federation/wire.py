"""What travels between parties: one flat mapping from name to tensor, readable without pickle.

Model tensors keep their ``state_dict`` names, which never contain a slash. Everything else has a namespaced
name: ``metric/loss`` for numbers, ``refused/reason`` for a client that has no update to give, ``client/...`` for what a
client keeps where that travels with it, and whatever aggregator or method adds (``scaffold/c/conv.weight``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from calfat_plugin.errors import UpdateError
from calfat_plugin.results import LocalUpdate

if TYPE_CHECKING:
    from torch import Tensor

Wire = OrderedDict[str, "Tensor"]  # an OrderedDict, because the host takes a plain dict for a map per client

_METRIC = "metric/"
_REFUSED = "refused/reason"
_CLIENT = "client/"
_RESERVED = (_METRIC, _REFUSED, _CLIENT)


def pack_downlink(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> Wire:
    """One mapping for the host to send. Tensors are not copied."""
    _check_namespaces(state, extras)
    return OrderedDict({**state, **extras})


def unpack_downlink(wire: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of :func:`pack_downlink`: (the global model, the extras of aggregator and method)."""
    extras = {name: tensor for name, tensor in wire.items() if "/" in name}
    return {name: tensor for name, tensor in wire.items() if name not in extras}, extras


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


def is_refusal(wire: Mapping[str, Tensor]) -> bool:
    """Whether a message is one of :func:`pack_refusal`."""
    return _REFUSED in wire


def add_client_state(wire: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Wire:
    """A message that brings along what its client keeps, for runtimes in which any process may train any client."""
    return OrderedDict({**wire, **{_CLIENT + name: tensor for name, tensor in state.items()}})


def take_client_state(wire: Mapping[str, Tensor]) -> tuple[Wire, dict[str, Tensor]]:
    """The inverse of :func:`add_client_state`: (message, what the client keeps)."""
    state = {name.removeprefix(_CLIENT): tensor for name, tensor in wire.items() if name.startswith(_CLIENT)}
    return OrderedDict((name, tensor) for name, tensor in wire.items() if not name.startswith(_CLIENT)), state


def unpack_update(wire: Mapping[str, Tensor], num_examples: int) -> LocalUpdate:
    """The inverse of :func:`pack_update`. It comes from another party, so nothing about it is taken for granted.

    Raises:
        UpdateError: with the client's own reason, when it sent a refusal; or with what cannot be read.
    """
    from torch import Tensor

    strangers = [name for name, value in wire.items() if not isinstance(name, str) or not isinstance(value, Tensor)]
    if strangers:
        raise UpdateError(f"its message cannot be read: '{strangers[0]}' is no tensor under a text name")
    if _REFUSED in wire:
        raise UpdateError(bytes(wire[_REFUSED].flatten().byte().tolist()).decode(errors="replace"))
    if not isinstance(num_examples, int) or num_examples < 1:
        raise UpdateError(f"it claims {num_examples} training examples; expected 1 or more")
    state: dict[str, Tensor] = {}
    extras: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    for name, tensor in wire.items():
        if name.startswith(_METRIC):
            if tensor.numel() != 1 or tensor.is_complex():
                found = f"has shape {tuple(tensor.shape)} and type {tensor.dtype}"
                raise UpdateError(f"its '{name}' {found}; expected a number")
            metrics[name.removeprefix(_METRIC)] = float(tensor)
        elif "/" in name:
            if not bool(tensor.isfinite().all()):  # it enters the aggregator's memory, where a nan would stay
                raise UpdateError(f"its '{name}' holds nan or inf")
            extras[name] = tensor
        else:
            state[name] = tensor
    return LocalUpdate(state=state, num_examples=num_examples, extras=extras, metrics=metrics)


def num_bytes(wire: Mapping[str, Tensor]) -> int:
    """Payload of a message in bytes, framing not counted; what is no tensor counts nothing (and is refused)."""
    return sum(int(getattr(value, "nbytes", 0)) for value in wire.values())


def _check_namespaces(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
    wrong = [name for name in state if "/" in name] + [name for name in extras if "/" not in name]
    if wrong:
        raise UpdateError(
            f"the tensor '{wrong[0]}' is misnamed: model tensors have no '/' in their name, extras begin with a "
            "namespace such as 'scaffold/'."
        )
    taken = [name for name in extras if name.startswith(_RESERVED)]
    if taken:
        raise UpdateError(f"the extra '{taken[0]}' is misnamed: {', '.join(_RESERVED)} mean something here already.")
