"""What a party that means harm sends, to FedML's silos and to Flower's SuperNodes; no host is imported here."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hypothesis import strategies as st
from torch import Tensor

from calfat_plugin.federation.wire import pack_update
from calfat_plugin.interfaces import State
from calfat_plugin.results import LocalUpdate

NAME = "classifier.weight"

# --- bytes ------------------------------------------------------------------------------------------------------------

STATUS, UPDATE, MODEL, FINISH = 5, 3, 2, 7  # FedML's message types
GIGABYTES = 2 * 1024**3
WEIGHTS = {"w": {"dtype": "F32", "shape": [GIGABYTES // 4], "data_offsets": [0, GIGABYTES]}}


class Payload:
    """Runs code in whoever unpickles it, as it does on plain FedML."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def message(fields: dict[str, Any], tensors: dict[str, Any] | None = None, data: bytes = b"") -> bytes:
    """A message as our own code would write it."""
    header = json.dumps({"__metadata__": {"calfat": json.dumps(fields)}, **(tensors or {})}).encode()
    return len(header).to_bytes(8, "little") + header + data


#: Made by whoever unpickles; of this process, always as long, for a snapshot shows what the length comes to.
EXECUTED = Path(f"/tmp/calfat-{os.getpid():08}")
#: In the place of an update from rank 2 to the server.
_FIELDS = {"msg_type": UPDATE, "sender": 2, "receiver": 0, "num_samples": 9}
BYTES: Mapping[str, bytes] = {
    "nothing": b"",
    "noise": random.Random(1).randbytes(5000),
    "pickled": pickle.dumps(Payload(EXECUTED)),
    "a header of gigabytes": GIGABYTES.to_bytes(8, "little") + b"{}",
    "tensors of gigabytes": message(_FIELDS, WEIGHTS),
    "broken off": message(_FIELDS)[:-7],
    "zeros": bytes(100_000),
    "deep nesting": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "no description": message(_FIELDS, {"\x1b[2Jw": 7}),
    "no such type": message(_FIELDS, {"w": {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "another shape": message(_FIELDS, {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}, bytes(4)),
    "a long name": message(_FIELDS, {"w" * 1001: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "more than described": message(_FIELDS, {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
}

# --- updates that are well-formed, and no server should use -----------------------------------------------------------


def _change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda wire: wire.update({name: change(wire[name])})


#: What a client that lies does to its update, a round each; the last but one is one of SCAFFOLD.
LIES: tuple[Callable[[dict[str, Tensor]], object], ...] = (
    _change(NAME, lambda tensor: torch.full_like(tensor, math.nan)),
    _change(NAME, torch.Tensor.flatten),
    lambda wire: wire.pop(NAME),
    _change(f"scaffold/change/{NAME}", lambda tensor: torch.zeros(3)),
    _change("metric/loss", lambda tensor: torch.zeros(7)),
)


def honest(state: State, aggregator: str, shift: float) -> dict[str, Tensor]:
    """An update of a client that has not trained."""
    moved = {name: (tensor + shift).to(tensor.dtype) for name, tensor in state.items()}
    changes = {f"scaffold/change/{name}": torch.full_like(tensor, 0.01) for name, tensor in state.items()}
    extras = changes if aggregator == "scaffold" else {}
    return dict(pack_update(LocalUpdate(moved, 10, extras, metrics={"loss": 1.0})))


# --- changes of an update, for Hypothesis -----------------------------------------------------------------------------


def dtypes() -> list[torch.dtype]:
    """All that a tensor can be made of here."""
    found = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            torch.zeros(1).to(dtype)
        except (RuntimeError, NotImplementedError):
            continue
        found.append(dtype)
    return sorted(found, key=str)


CARRIED = [dtype for dtype in dtypes() if dtype in set(safetensors.torch._TYPES.values())]
NUMBERS = st.sampled_from([0.0, -1.0, 1e-40, 5e5, 1e10, 1e17, 1e18, -9.2e18, 1e30, 3.4e38, 1e300, math.nan, math.inf])
SHAPES = st.sampled_from([None, (), (0,), (1,), (10,), (3, 0, 2), (1,) * 12])
EXAMPLES = st.sampled_from(
    [1, 10, 0, -1, 2**53, 2**53 + 1, 10**400, -(10**400), 10**5000, -(10**5000), True, None, "7", 1.5, math.nan, [10]]
)
NAMES = st.sampled_from(
    [NAME, "classifier.bias", f"scaffold/change/{NAME}", "metric/loss", "metric/", "refused/reason", "a/b", "client/x"]
) | st.text(max_size=9)
TENSORS = st.tuples(st.sampled_from(dtypes()), SHAPES, NUMBERS)
SENT = st.dictionaries(NAMES, st.tuples(st.sampled_from(CARRIED), SHAPES, NUMBERS), max_size=3)
NESTED = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
AGGREGATORS = st.sampled_from(["fedavg", "scaffold", "fedadam"])


def built(description: tuple[torch.dtype, tuple[int, ...] | None, float], like: Tensor) -> Tensor:
    """The tensor of this type, shape (None: that of ``like``) and number."""
    dtype, shape, number = description
    return torch.full(like.shape if shape is None else shape, number, dtype=torch.float64).to(dtype)
