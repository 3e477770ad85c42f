"""A card that is not there: tensors that say ``cuda:0``, hold memory of the CPU, and refuse to meet the CPU's tensors.

It shows whether tensors are where they belong, and nothing of a card's kernels or speed. It computes with the CPU's
kernels, and what is drawn on it comes from the CPU's generators: where a model takes the same operations on both
devices, it has the CPU's bits.

It needs a torch that was built without CUDA, and a process of its own: ``guard.cpp``, compiled, is loaded before torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CARD = torch.device("cuda", 0)
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten._copy_from.default}
_INDEXED = {
    _aten.index.Tensor,
    _aten._unsafe_index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
_JOINED = {_aten.cat.default, _aten.stack.default}
_Generator = torch.Generator
_generators: dict[int, Any] = {}  # by address: torch wraps what it is given anew


class CardTensor(Tensor):
    """A tensor on the card.

    Attributes:
        raw: what it holds, on the CPU.
    """

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> CardTensor:
        made = Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=CARD, layout=raw.layout
        )
        made.raw = raw
        return made

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: CardTensor) -> None:
        Tensor.data.__set__(self, other)
        self.raw = other.raw

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_as_tensor(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_as_tensor(index), value)

    def tolist(self) -> Any:
        return self.raw.detach().tolist()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, device: Any = CARD) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device)

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{self.raw.detach()!r} on {CARD}"

    def __format__(self, form: str) -> str:
        return format(self.raw.detach(), form)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _as_tensor(index: Any) -> Any:
    """Of a list: torch would make one on the card, and leaves out modes while it does."""
    return torch.tensor(index) if isinstance(index, list) else index


class Card(TorchDispatchMode):
    """While it is entered, what is made or copied with ``device="cuda"`` is on the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry an operation out on the CPU, if a card would carry it out."""
    given: list[Tensor] = []
    generators: list[torch.Generator] = []

    def raw(each: Any) -> Any:
        if isinstance(each, Tensor):
            given.append(each)
            return each.raw if isinstance(each, CardTensor) else each
        if isinstance(each, _Generator):
            generators.append(each)
        return each

    raw_args, raw_kwargs = _mapped(raw, args), {name: _mapped(raw, each) for name, each in kwargs.items()}
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    wrappers = {id(each.raw): each for each in given if isinstance(each, CardTensor)}
    on_card = bool(wrappers) if device is None else device.type == CARD.type
    if any((each._cdata in _generators) != on_card for each in generators):
        raise RuntimeError(f"Expected a generator of {CARD if on_card else 'cpu'}, but found one of another ({func})")
    if not wrappers and not on_card:
        return func(*args, **kwargs)
    if device is not None:
        if (device.index or 0) > 0:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
        raw_kwargs["device"] = torch.device("cpu")
    if func not in _COPIES and not _may_meet(func, args, kwargs, given):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")
    func = _aten.zeros.default if func is _aten._efficientzerotensor.default else func  # whose tensor holds nothing

    def wrapped(each: Any) -> Any:
        if isinstance(each, Tensor):
            return wrappers[id(each)] if id(each) in wrappers else CardTensor(each)  # in place: the same object again
        return each

    found = func(*raw_args, **raw_kwargs)
    return _mapped(wrapped, found) if on_card else found


def _mapped(change: Callable[[Any], Any], each: Any) -> Any:
    """``each`` with every part of it changed; no closure, whose cycle would keep tensors that are to be swapped."""
    if isinstance(each, (list, tuple)):
        return type(each)([_mapped(change, part) for part in each])
    return change(each)


def _may_meet(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Whether a card takes these tensors together."""
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in _outputs(func)]
    if any(isinstance(each, Tensor) and not isinstance(each, CardTensor) for each in written):
        return False
    if func in _INDEXED:  # by positions on either device; the tensor, and what is put into it, are on the card
        tensors = [args[0], *args[2:3]]
    return all(isinstance(each, CardTensor) or (each.dim() == 0 and func not in _JOINED) for each in tensors)


@cache
def _outputs(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(n, each.name) for n, each in arguments if each.alias_info is not None and each.alias_info.is_write]


class _GeneratorOfCard(_Generator):
    """A generator of the CPU's numbers for tensors on the card."""

    device = CARD


class _Generators(type):
    """In the place of ``torch.Generator``, which makes none of a device that torch was built without."""

    def __instancecheck__(cls, given: object) -> bool:
        return isinstance(given, _Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != CARD.type:
            return _Generator(device)
        made = _GeneratorOfCard()
        _generators[made._cdata] = made
        return made


def _on_card(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` or ``torch.as_tensor``, which leave out modes while they copy what they are given."""

    def made(data: Any, *, device: Any = None, **others: Any) -> Tensor:
        if device is None:
            return make(data, **others)
        return make(data, **others).to(device)

    return made


def _swapping(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``Module._apply``, which else would change parameters in place; into tensors of another class it cannot."""

    def swapped(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return swapped


def install() -> None:
    """Let torch say that it has a card. Under ``with Card()`` it then has one, for the rest of the process."""
    nn.Module._apply = _swapping(nn.Module._apply)
    torch.Generator = _Generators("Generator", (), {})
    torch.tensor, torch.as_tensor = _on_card(torch.tensor), _on_card(torch.as_tensor)
    state = _Generator().get_state()
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **how: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "a card that is not there",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": state.clone(),
        "set_rng_state": lambda new_state, device="cuda": None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for module in (torch.cuda, torch.cuda.random):
        for name in answers.keys() & vars(module).keys():
            setattr(module, name, answers[name])
