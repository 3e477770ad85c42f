"""Where a run computes and with how many threads, and what is written down of it: ``environment.json``."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.errors import OptionError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.installed import version_of
from calfat_plugin.layouts import using_layout
from calfat_plugin.profiling import Profile
from calfat_plugin.registry import Registry

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


def check_device(name: str, option: str) -> None:
    """Refuse what names no device, without importing torch; ``option`` is what the user set."""
    if not _DEVICE.fullmatch(name):
        raise OptionError(f"{option} {name}: expected cpu, cuda, or cuda:N such as cuda:0.")


def named_device(name: str, option: str) -> torch.device:
    import torch

    check_device(name, option)
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (seen := torch.cuda.device_count()):
        raise OptionError(f"{option} {name}: torch sees {seen} GPU{'' if seen == 1 else 's'} here.")
    return device


def pick_device(experiment: Experiment, warn: Callable[[str], None], worker: int = 0) -> torch.device:
    """Where the recipe wants to compute; the CPU, with a warning, where its GPU is missing."""
    import torch

    wanted = experiment.device
    if not wanted.using_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        warn("device_args.using_gpu is true, but torch sees no GPU here; computing on the CPU.")
        return torch.device("cpu")
    if wanted.gpu_id >= torch.cuda.device_count():
        raise experiment.document.error(
            ("device_args", "gpu_id"), f"got {wanted.gpu_id}, but torch sees {torch.cuda.device_count()} GPU(s)."
        )
    return torch.device("cuda", (wanted.gpu_id + worker) % torch.cuda.device_count())


def new_profile(device: torch.device) -> Profile:
    import torch

    if device.type == "cuda":
        return Profile(lambda: torch.cuda.synchronize(device))
    return Profile()


def with_resolved_precision(experiment: Experiment) -> Experiment:
    """The experiment with ``calfat.runtime.precision: auto`` replaced by what it means here.

    A run is recorded with that: it cannot be resumed, and no party can join it, in another arithmetic. The document has
    it, too: other processes resolve that anew, and may see other devices.
    """
    runtime, path = experiment.runtime, ("calfat", "runtime", "precision")
    if runtime.precision != "auto":
        return experiment
    from calfat_plugin.maths.precision import chosen

    here = chosen(runtime.precision, pick_device(experiment, lambda text: None))
    document = experiment.document.with_value(path, here, experiment.document.place(path))
    return replace(experiment, document=document, runtime=replace(runtime, precision=here))


@contextmanager
def computing_as(experiment: Experiment) -> Iterator[None]:
    """The recipe's number of threads and memory layout for a while: arithmetic depends on both in the last bits."""
    import torch

    threads, before = experiment.runtime.threads, torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with using_layout(experiment.runtime.layout):
            yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


_DISTRIBUTIONS = (
    "calfat-plugin",
    "fedml",
    "flwr",
    "ray",
    "torch",
    "torchvision",
    "numpy",
    "scikit-learn",
    "pyautoattack",
    "pluggy",
    "safetensors",
)


def describe_environment(device: Any, registry: Registry, command: list[str], precision: str) -> dict[str, Any]:
    """Versions, device, threads, precision, plugins, commit; ready for JSON."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "device": str(device),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "plugins": [f"{provider} ({provider.plugin})" for provider in registry.plugins()],
        "plugins_not_loaded": [str(failure) for failure in registry.failures],
        "commit": commit_of(Path(__file__).resolve().parents[2]),
        "executable": sys.executable,
    }


def environment_of(experiment: Experiment, device: torch.device, command: list[str]) -> dict[str, Any]:
    """The same of a run, with the host that runs its rounds."""
    environment = describe_environment(device, experiment.registry, command, experiment.runtime.precision)
    return {**environment, "host": experiment.common.host}


def processor() -> str:
    """The processor's name and its vector units as torch uses them, which decide how sums are rounded."""
    import torch

    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        said = ""
    name = next((line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def commit_of(source: Path) -> str | None:
    """Commit of a source tree, ``-dirty`` where files differ from it; None for an installed package or without git.

    Git only looks: ``describe --dirty`` alone would write the index, under a lock that a kill leaves behind, and then
    refuse every command of whoever works in that tree.
    """
    if not (source / ".git").exists():
        return None

    def said(*words: str) -> str:
        look = ["git", "--no-optional-locks", "-C", str(source), *words]
        return subprocess.run(look, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit, changed = said("describe", "--always", "--abbrev=40"), said("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit
