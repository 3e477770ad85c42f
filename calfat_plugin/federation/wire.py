"""What travels between parties: one flat mapping from name to tensor, readable without pickle.

Model tensors keep their ``state_dict`` names, which never contain a slash. Everything else has a namespaced
name: ``metric/loss`` for numbers, ``refused/reason`` for a client that has no update to give, and whatever aggregator
or method adds (``scaffold/c/conv.weight``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from calfat_plugin.errors import UpdateError
from calfat_plugin.maths.averaging import LARGEST, value_problem
from calfat_plugin.peer_text import MAX_TEXT
from calfat_plugin.results import ALIGNMENT, PASSES, LocalUpdate

if TYPE_CHECKING:
    from torch import Tensor

_METRIC = "metric/"
_REFUSED = "refused/reason"
_RESERVED = (_METRIC, _REFUSED)
_ROUNDING = 1e-3  # of a mean of cosines
#: Metrics that every client measures in the same way, with their lowest and highest value; the record adds them up.
_RANGES = {PASSES: (0.0, LARGEST), ALIGNMENT: (-1.0 - _ROUNDING, 1.0 + _ROUNDING)}
_MOST_EXAMPLES = 2**53  # up to here float64, in which weights are computed, holds every integer


class Wire(OrderedDict[str, "Tensor"]):
    """A message. An ``OrderedDict``, because the host takes a plain dict for a map per client."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Wire:
        """The host copies each message of a simulation, both ways; tensor by tensor, that is ten times as fast."""
        from torch import Tensor

        copy = Wire()
        for name, value in self.items():
            if isinstance(value, Tensor):
                copy[name] = value.clone()
            else:
                copy[name] = deepcopy(value, memo)
        return copy


def pack_downlink(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> Wire:
    """One mapping for the host to send. Tensors are not copied."""
    _check_namespaces(state, extras)
    return Wire({**state, **extras})


def unpack_downlink(wire: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of :func:`pack_downlink`: (the global model, the extras of aggregator and method)."""
    state = {}
    extras = {}
    for name, tensor in wire.items():
        if "/" in name:
            extras[name] = tensor
        else:
            state[name] = tensor
    return state, extras


def pack_update(update: LocalUpdate) -> Wire:
    """One mapping for the host to send. ``client_state`` stays behind: it never leaves the client."""
    import torch

    _check_namespaces(update.state, update.extras)
    metrics = {_METRIC + name: torch.tensor(value, dtype=torch.float64) for name, value in update.metrics.items()}
    return Wire({**update.state, **update.extras, **metrics})


def pack_refusal(reason: str) -> Wire:
    import torch

    return Wire({_REFUSED: torch.tensor(list(reason.encode()), dtype=torch.uint8)})


def unpack_update(wire: Mapping[str, Tensor], num_examples: int) -> LocalUpdate:
    """The inverse of :func:`pack_update`. It comes from another party, so everything about it is checked.

    Raises:
        UpdateError: the message cannot be used, or it is a refusal, whose reason is then the text.
    """
    _check_tensors(wire)
    if _REFUSED in wire:
        reason = wire[_REFUSED].flatten()[: 4 * MAX_TEXT]
        raise UpdateError(bytes(reason.byte().tolist()).decode(errors="replace"))
    if type(num_examples) is not int or not 1 <= num_examples <= _MOST_EXAMPLES:  # a bool is an int, too
        if isinstance(num_examples, int) and abs(num_examples) > _MOST_EXAMPLES:  # it may have too many digits to print
            raise UpdateError("it claims an absurd number of training examples; expected 1 to 2^53")
        raise UpdateError(f"it claims {num_examples} training examples; expected 1 or more")
    state = {}
    extras = {}
    metrics = {}
    for name, tensor in wire.items():
        if name.startswith(_METRIC):
            metrics[name.removeprefix(_METRIC)] = _metric(name, tensor)
        elif "/" in name:
            problem = value_problem(tensor)
            if problem:  # it enters the aggregator's memory, where a nan would stay
                raise UpdateError(f"its '{name}' {problem}")
            extras[name] = tensor
        else:
            state[name] = tensor
    return LocalUpdate(state=state, num_examples=num_examples, extras=extras, metrics=metrics)


def _check_tensors(wire: Mapping[str, Tensor]) -> None:
    """Refuse what is not a tensor of a common type: on some others (float8, complex) arithmetic is not defined."""
    import torch

    reals = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    integers = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
    for name, value in wire.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UpdateError(f"its message cannot be read: '{name}' is no tensor under a text name")
        if value.dtype not in reals | integers:
            raise UpdateError(f"its '{name}' has type {value.dtype}; expected a common real or integer type")


def _metric(name: str, tensor: Tensor) -> float:
    """The number in the message under ``name``. It may be nan, such as the loss of a training that diverged."""
    if tensor.numel() != 1:
        form = f"shape {tuple(tensor.shape)} and type {tensor.dtype}"
        raise UpdateError(f"its '{name}' has {form}; expected a number")
    number = float(tensor)
    if abs(number) > LARGEST:
        raise UpdateError(f"its '{name}' is {number:.3g}; expected a number up to {LARGEST:g}")
    bounds = _RANGES.get(name.removeprefix(_METRIC))
    if bounds is not None:
        low, high = bounds
        if not low <= number <= high:
            raise UpdateError(f"its '{name}' is {number:.3g}; expected a number from {low:g} to {high:g}")
    return number


def num_bytes(wire: Mapping[str, Tensor]) -> int:
    """Payload of a message in bytes, without framing. Only tensors count; unpacking refuses anything else."""
    return sum(int(getattr(value, "nbytes", 0)) for value in wire.values())


def _check_namespaces(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
    misnamed = [name for name in state if "/" in name]
    misnamed += [name for name in extras if "/" not in name]
    if misnamed:
        raise UpdateError(
            f"the tensor '{misnamed[0]}' is misnamed: model tensors have no '/' in their name, extras begin with a "
            "namespace such as 'scaffold/'."
        )
    for name in extras:
        if name.startswith(_RESERVED):
            raise UpdateError(f"the extra '{name}' is misnamed: {', '.join(_RESERVED)} are reserved.")
