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
#: Metrics that every client measures in the same way, with what they can be; the record adds them up.
_RANGES = {PASSES: (0.0, LARGEST), ALIGNMENT: (-1.0 - _ROUNDING, 1.0 + _ROUNDING)}
_MOST_EXAMPLES = 2**53  # up to here float64, in which weights are computed, holds every integer


class Wire(OrderedDict[str, "Tensor"]):
    """A message. An ``OrderedDict``, because the host takes a plain dict for a map per client."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Wire:
        """The host copies each message of a simulation, both ways; tensor by tensor, that is ten times as fast."""
        from torch import Tensor

        return Wire(
            (name, value.clone() if isinstance(value, Tensor) else deepcopy(value, memo))
            for name, value in self.items()
        )


def pack_downlink(state: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> Wire:
    """One mapping for the host to send. Tensors are not copied."""
    _check_namespaces(state, extras)
    return Wire({**state, **extras})


def unpack_downlink(wire: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of :func:`pack_downlink`: (the global model, the extras of aggregator and method)."""
    extras = {name: tensor for name, tensor in wire.items() if "/" in name}
    return {name: tensor for name, tensor in wire.items() if name not in extras}, extras


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
    """The inverse of :func:`pack_update`. It comes from another party, so nothing about it is taken for granted."""
    import torch

    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    common = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *integers}
    for name, value in wire.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UpdateError(f"its message cannot be read: '{name}' is no tensor under a text name")
        if value.dtype not in common:  # on some others (float8, complex) arithmetic is not defined
            raise UpdateError(f"its '{name}' has type {value.dtype}; expected a common real or integer type")
    if _REFUSED in wire:
        raise UpdateError(bytes(wire[_REFUSED].flatten()[: 4 * MAX_TEXT].byte().tolist()).decode(errors="replace"))
    if type(num_examples) is not int or not 1 <= num_examples <= _MOST_EXAMPLES:
        if isinstance(num_examples, int) and abs(num_examples) > _MOST_EXAMPLES:  # its digits may be too many to print
            raise UpdateError("it claims an absurd number of training examples; expected 1 to 2^53")
        raise UpdateError(f"it claims {num_examples} training examples; expected 1 or more")
    state: dict[str, Tensor] = {}
    extras: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    for name, tensor in wire.items():
        if name.startswith(_METRIC):
            if tensor.numel() != 1:
                form = f"shape {tuple(tensor.shape)} and type {tensor.dtype}"
                raise UpdateError(f"its '{name}' has {form}; expected a number")
            metric = name.removeprefix(_METRIC)
            number = metrics[metric] = float(tensor)
            if abs(number) > LARGEST:  # a nan is let in, such as the loss of a training that diverged
                raise UpdateError(f"its '{name}' is {number:.3g}; expected a number up to {LARGEST:g}")
            if metric in _RANGES:
                low, high = _RANGES[metric]
                if not low <= number <= high:
                    raise UpdateError(f"its '{name}' is {number:.3g}; expected a number from {low:g} to {high:g}")
        elif "/" in name:
            problem = value_problem(tensor)
            if problem:  # it enters the aggregator's memory, where a nan would stay
                raise UpdateError(f"its '{name}' {problem}")
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
        raise UpdateError(f"the extra '{taken[0]}' is misnamed: {', '.join(_RESERVED)} are reserved.")
