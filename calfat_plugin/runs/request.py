"""What a user asks to run, where it is written, and the device that computes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.errors import OptionError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.host.runtimes import runtime_of, supported_runtime
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.registry import Registry

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True)
class Request:
    """One run, or the continuation of one."""

    experiment: Experiment
    run_dir: Path | None
    resume: bool
    command: list[str]
    workers: int = 0  # that train a simulation's clients side by side; 0: this process trains them
    profile: bool = False
    page: bool = True  # whether the page is drawn when the run is finished

    def __post_init__(self) -> None:
        runtime_of(self.experiment).refuse_without_host()
        object.__setattr__(self, "experiment", with_resolved_precision(self.experiment))


def checked_experiment(
    document: Document,
    overrides: Iterable[str] = (),
    seed: int | None = None,
    *,
    download: bool = False,
    plugins: Iterable[str | Path] = (),
) -> Experiment:
    """Override and resolve a recipe, and refuse what the host cannot run: all that needs neither torch nor FedML."""
    if "axes" in document.data:
        raise document.mistaken_for("suite", "suite")
    document = with_plugins(document.with_overrides(overrides), plugins)
    if seed is not None:
        document = document.with_value(("common_args", "random_seed"), seed, f"--seed {seed}")
    if download:
        document = document.with_value(("calfat", "dataset", "download"), True, "--download")
    experiment = assemble(document, Registry.for_recipe(document))
    supported_runtime(experiment)
    return experiment


# --- its device -------------------------------------------------------------------------------------------------------


def check_device(name: str, option: str) -> None:
    """Refuse what names no device, without importing torch; ``option`` is what the user set."""
    if not _DEVICE.fullmatch(name):
        raise OptionError(f"{option} {name}: expected cpu, cuda, or cuda:N such as cuda:0.")


def named_device(name: str, option: str) -> torch.device:
    """The device that the user named; ``option`` is what the user set."""
    import torch

    check_device(name, option)
    device = torch.device(name)
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if (device.index or 0) >= num_gpus:
            plural = "" if num_gpus == 1 else "s"
            raise OptionError(f"{option} {name}: torch sees {num_gpus} GPU{plural} here.")
    return device


def pick_device(experiment: Experiment, warn: Callable[[str], None], worker: int = 0) -> torch.device:
    """The device that the recipe asks for; the CPU, with a warning, where its GPU is missing.

    ``worker`` is the number of this process on its machine: workers take the GPUs in turn.
    """
    import torch

    device_args = experiment.device
    if not device_args.using_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        warn("device_args.using_gpu is true, but torch sees no GPU here; computing on the CPU.")
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if device_args.gpu_id >= num_gpus:
        raise experiment.document.error(
            ("device_args", "gpu_id"), f"got {device_args.gpu_id}, but torch sees {num_gpus} GPU(s)."
        )
    return torch.device("cuda", (device_args.gpu_id + worker) % num_gpus)


def with_resolved_precision(experiment: Experiment) -> Experiment:
    """The experiment with ``calfat.runtime.precision: auto`` replaced by what it means on this machine.

    A run is recorded with that: it cannot be resumed, and no party can join it, in another arithmetic. The document has
    it, too: other processes would resolve ``auto`` again, and may see other devices.
    """
    runtime = experiment.runtime
    if runtime.precision != "auto":
        return experiment
    from calfat_plugin.maths.passes import chosen_precision

    path = ("calfat", "runtime", "precision")
    precision = chosen_precision(runtime.precision, pick_device(experiment, lambda text: None))
    document = experiment.document.with_value(path, precision, experiment.document.place(path))
    return replace(experiment, document=document, runtime=replace(runtime, precision=precision))
