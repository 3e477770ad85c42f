"""The memory layout of convolutions: what a recipe asks for, and whether this processor computes in it without dying.

Channels last is several times faster. But in the backward pass of a strided 1x1 convolution with few channels, oneDNN
(part of torch) writes past the end of a buffer on processors with AVX2 alone. The process then dies by a signal, maybe
much later. So such convolutions are tried once, forward and backward, in a child process.

The result is remembered by convolution, processor and version of torch, in this process and in a file for the next
one. So all processes of a run, and all runs of a suite, take the same layout on a machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from calfat_plugin.compat import CRASHES, ending
from calfat_plugin.disk import state_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

Layout = Literal["contiguous", "channels_last"]
CONTIGUOUS: Layout = "contiguous"
CHANNELS_LAST: Layout = "channels_last"
AUTO = "auto"
CHOICES = (AUTO, CONTIGUOUS, CHANNELS_LAST)
KEY = "calfat.runtime.layout"

FEW_CHANNELS = 16  # float32 numbers of a vector of AVX-512; where a vector is full, nothing is written beside it
_BATCH = 4  # images of the trial
_PATIENCE = 600.0  # seconds; a damaged heap may also let a process wait for ever

#: What the child runs. It needs torch alone, so it starts fast, and does not execute code of the user's.
TRIAL = """
import json, sys
import torch
from torch.nn.functional import conv2d

asked = json.load(sys.stdin)
torch.set_num_threads(asked["threads"])
for case in asked["convolutions"]:
    out_channels, in_channels, height, width = case["weight"]
    strides = (in_channels * height * width, 1, in_channels * width, in_channels)
    for _ in range(20):  # a damaged heap shows when memory is taken and given back
        images = torch.rand(asked["batch"], case["channels"], *case["size"])
        images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
        weight = torch.empty_strided(case["weight"], strides).uniform_().requires_grad_()
        maps = conv2d(images, weight, None, case["stride"], case["padding"], case["dilation"], case["groups"])
        torch.autograd.grad(maps, [images, weight], torch.rand_like(maps))
"""
#: For glibc in the child: freed memory goes back at once, past the caches that would not look at it.
_CHECKED_HEAP = "glibc.malloc.tcache_count=0"


@dataclass(frozen=True)
class Convolution:
    """A convolution as a network calls it, without its batch."""

    weight: tuple[int, ...]  # shape: (out channels, in channels of a group, height, width)
    channels: int  # of the images
    size: tuple[int, ...]  # of the images: (height, width)
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def is_risky(self) -> bool:
        """Whether it is of the kind that may end the process."""
        return self.weight[2:] == (1, 1) and max(self.stride) > 1 and self.weight[1] <= FEW_CHANNELS


_asked: str = AUTO  # what the recipe of this process asks for
_known: dict[str, Layout] = {}  # results by digest of a trial


@contextmanager
def using_layout(asked: str) -> Iterator[None]:
    """Let the networks of this process compute in the layout that a recipe asks for, for a while."""
    before = _asked
    ask_for(asked)
    try:
        yield
    finally:
        ask_for(before)


def ask_for(asked: str) -> None:
    """The same for as long as this process lives.

    It is a setting of the process, as torch's number of threads is: a worker of Dask trains in several threads.
    """
    global _asked
    _asked = asked


def layout_of(model: nn.Module, x: Tensor) -> Layout:
    """In which layout the weights of a model's convolutions are to be while images like ``x`` pass through it."""
    if _asked != AUTO:
        return cast("Layout", _asked)
    if x.device.type != "cpu":
        return CHANNELS_LAST
    # The shapes of weights rule most models out, without the time that a pass takes.
    shapes = [weight.shape for weight in model.parameters() if weight.dim() == 4]
    if not any(shape[2:] == (1, 1) and shape[1] <= FEW_CHANNELS for shape in shapes):
        return CHANNELS_LAST
    risky = {call for call in _convolutions_of(model, x) if call.is_risky}
    if not risky:
        return CHANNELS_LAST
    return _tried(sorted(risky, key=repr))


def _convolutions_of(model: nn.Module, x: Tensor) -> list[Convolution]:
    """Every 2-d convolution of a forward pass, also those that are no modules.

    Empty where the pass fails: the pass of the training then raises the error.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[Convolution] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.convolution.default:
                images, weight, _, stride, padding, dilation, transposed, _, groups = args
                if weight.dim() == 4 and not transposed:
                    convolution = Convolution(
                        weight=tuple(weight.shape),
                        channels=images.shape[1],
                        size=tuple(images.shape[2:]),
                        stride=tuple(stride),
                        padding=tuple(padding),
                        dilation=tuple(dilation),
                        groups=groups,
                    )
                    calls.append(convolution)
            return function(*args, **(kwargs or {}))

    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), Watch():  # type: ignore[no-untyped-call]
            model.eval()  # batch statistics stay as they are
            model(x)
    except Exception:  # somebody else's model may fail in any way
        return []
    finally:
        for module, training in modes:
            module.training = training
    return calls


def _tried(convolutions: Sequence[Convolution]) -> Layout:
    """The layout in which these convolutions do not end the process; from an earlier trial if there was one."""
    import torch

    trial = {
        "batch": _BATCH,
        "threads": torch.get_num_threads(),
        "convolutions": [asdict(convolution) for convolution in convolutions],
    }
    isa_limits = [os.environ.get("ONEDNN_MAX_CPU_ISA"), os.environ.get("DNNL_MAX_CPU_ISA")]
    machine = [torch.__version__, _processor(), *isa_limits]
    digest = hashlib.sha256(json.dumps([trial, machine]).encode()).hexdigest()
    if digest not in _known:
        layout = _read(digest)
        if layout is None:
            layout = _result_of(trial)
            with suppress(OSError):  # then the next process tries it again
                _file().parent.mkdir(parents=True, exist_ok=True)
                with _file().open("a", encoding="ascii") as file:
                    file.write(f"{digest} {layout}\n")
        _known[digest] = layout
        log.info("convolutions compute %s (%s: %s)", layout, KEY, AUTO)
    return _known[digest]


def _result_of(trial: dict[str, Any]) -> Layout:
    """The layout to take: channels last if a child process survives these convolutions in it.

    Channels last is also taken where the child says nothing: no result may depend on chance.
    """
    command = [sys.executable, "-c", TRIAL]
    tunables = [setting for setting in (os.environ.get("GLIBC_TUNABLES"), _CHECKED_HEAP) if setting]
    environment = {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}
    try:
        child = subprocess.run(
            command, input=json.dumps(trial), env=environment, text=True, capture_output=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        log.warning("strided 1x1 convolutions with channels last did not end; convolutions compute contiguous")
        return CONTIGUOUS
    except OSError as error:
        log.warning("no process can be started to try strided 1x1 convolutions with channels last (%s)", error)
        return CHANNELS_LAST
    if -child.returncode in CRASHES:  # others come from outside, such as SIGKILL where memory runs out
        log.warning("strided 1x1 convolutions with channels last end a process by %s here", ending(child.returncode))
        return CONTIGUOUS
    if child.returncode != 0:
        log.warning("the trial of convolutions ended with %d: %s", child.returncode, child.stderr[-2000:])
    return CHANNELS_LAST


# --- what is known from earlier processes -----------------------------------------------------------------------------


def _file() -> Path:
    return state_folder() / "layouts"


def _read(digest: str) -> Layout | None:
    """The result of an earlier process of this user; None if there is none."""
    try:
        lines = _file().read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # there is none, or it is no longer ours to read
        return None
    for layout in (CONTIGUOUS, CHANNELS_LAST):
        if f"{digest} {layout}" in lines:
            return layout
    return None


def _processor() -> str:
    """What decides which code oneDNN takes."""
    import torch

    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in text.splitlines() if line.startswith(names)}
    return f"{torch.backends.cpu.get_cpu_capability()} {sorted(lines)}"
