"""The checks of data sets, models, partitions and loggers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from calfat_plugin import hookspecs
from calfat_plugin.datasets import Dataset, ImageData, pixels
from calfat_plugin.evaluators.base import are_probabilities
from calfat_plugin.experiment import Experiment
from calfat_plugin.interfaces import SetUpTask
from calfat_plugin.maths.tied import load_state, moved, state_of
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.models.building import built_model, refuse_other_training_mode, seeded
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult, RoundRecord, RunInfo, RunResult
from calfat_plugin.runs.request import named_device
from calfat_plugin.runs.session import Listeners
from calfat_plugin.testing.tiny import (
    NUM_CLASSES,
    numpy_state,
    one_thread,
    require,
    same_bits,
    tiny_experiment,
    unchanged,
)

_ABSOLUTE, _RELATIVE = 1e-5, 1e-4  # how far logits are off that are computed in another layout or with other images


@fresh_torch_state()
@one_thread()
def check_dataset(name: str, root: Path, *, registry: Registry | None = None, **options: Any) -> Dataset:
    """Hold a data set to its contract.

    It has the classes and the shape that its entry says, pixels in [0, 1], and is the same when it is read again.

    Args:
        name: as recipes name it.
        root: folder of its files (``data_args.data_cache_dir``).
        registry: where it is; None: among the built-ins and what is installed.
        options: instead of its defaults.

    Returns:
        The data set, for tests of its own.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it; ``DataError``: files are missing or damaged.
    """
    names = {"dataset": name, "data_cache_dir": str(root)}
    experiment = tiny_experiment(registry, data_args=names, dataset=options)
    entry = experiment.dataset.entry
    dataset = experiment.load_dataset()
    read_again = experiment.load_dataset()
    require(dataset.name == name, f"{name}: its name must be '{name}'; got '{dataset.name}'.")
    classes = entry.num_classes in (None, dataset.num_classes)
    require(classes, f"{name}: the entry says {entry.num_classes} classes, the data have {dataset.num_classes}.")
    shape = (dataset.in_channels, *dataset.image_size)
    require(entry.image_shape in (None, shape), f"{name}: the entry says images {entry.image_shape}; they are {shape}.")
    _check_split(f"{name}: the training", dataset.train, read_again.train)
    _check_split(f"{name}: the test", dataset.test, read_again.test)
    return dataset


def _check_split(which: str, data: ImageData, read_again: ImageData) -> None:
    low, high = pixels(data.x).aminmax()
    require(float(high) > float(low), f"{which} images are all of one grey, {float(low):g}.")
    same = torch.equal(data.x, read_again.x) and torch.equal(data.y, read_again.y)
    require(same, f"{which} split must be the same whenever it is read.")


@fresh_torch_state()
@one_thread()
def check_model(
    name: str,
    *,
    registry: Registry | None = None,
    device: str | torch.device = "cpu",
    in_channels: int = 3,
    image_size: tuple[int, int] = (8, 8),
    num_classes: int = 7,
    **options: Any,
) -> nn.Module:
    """Hold a model to its contract.

    It gives raw logits, (N, num_classes), that depend on nothing but its image; leaves images alone; has the same
    initial weights for the same seed; both images and all parameters get a gradient; its memory layout does not matter.
    Its state dict says what its logits are: another copy that loads it gives the same ones. Layers may have one tensor
    together, which is then one after loading, too; tensors that only overlap are refused.

    Args:
        name: as recipes name it, or ``module:factory``.
        registry: where it is; None: among the built-ins and what is installed.
        device: where to compute, ``cpu``, ``cuda`` or ``cuda:N``.
        in_channels: of the images to try it with.
        image_size: (H, W) of these images, in pixels.
        num_classes: how many labels there are.
        options: instead of its defaults.

    Returns:
        The model in evaluation mode on ``device``, for tests of its own.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it; ``ModelError``: it cannot take these images, or gives no logits.
    """
    where = named_device(str(device), "device")
    experiment = tiny_experiment(registry, model_args={"model": name}, model=options)
    shape: dict[str, Any] = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}

    def build() -> nn.Module:
        pick = experiment.model
        model = built_model(pick.entry.load(), experiment.who(pick), **shape, **asdict(pick.options))
        refuse_other_training_mode(model, experiment.who(pick), SetUpTask(**shape, device=where))
        return model

    model = seeded(build, 0)
    same_model = seeded(build, 0)
    tensors = all(isinstance(tensor, torch.Tensor) for tensor in model.state_dict().values())
    require(tensors, f"{name}: its state dict must hold nothing but tensors.")
    same = same_bits(model.state_dict(), same_model.state_dict())
    require(same, f"{name}: initial weights must come from torch's generator alone, so that a seed says what they are.")
    images = torch.rand(4, in_channels, *image_size, generator=torch.Generator().manual_seed(0)).to(where)
    model = moved(model, where)
    same_model = moved(same_model, where).eval()
    x = images.clone().requires_grad_()
    logits = model(x)
    require(not are_probabilities(logits), f"{name} must give raw logits; every row is a probability distribution.")
    logits.logsumexp(1).sum().backward()
    require(x.grad is not None and bool(x.grad.any()), f"{name}: images must get a gradient; attacks need it.")
    without = [key for key, value in model.named_parameters() if value.requires_grad and value.grad is None]
    require(not without, f"{name}: these parameters take no part in the logits: {', '.join(without)}.")
    _check_evaluation(name, same_model, images)
    _check_loading(name, model.eval(), moved(seeded(build, 0), where).eval(), images)
    return same_model


def _check_loading(name: str, model: nn.Module, copy: nn.Module, x: torch.Tensor) -> None:
    """A copy that loads what the model has stored gives the same logits."""
    changed = {}
    for key, tensor in state_of(model).items():
        changed[key] = tensor
        if tensor.is_floating_point():
            changed[key] = tensor * 1.01
    for network in (model, copy):
        load_state(network, changed)
        taken = same_bits(state_of(network), changed)
        require(taken, f"{name}: after load_state_dict its tensors must be those that it was given.")
    with torch.no_grad():
        same = torch.allclose(model(x), copy(x), atol=_ABSOLUTE, rtol=_RELATIVE)
    require(same, f"{name}: its state dict must hold all that logits depend on; a copy that loads it gives others.")


def _check_evaluation(name: str, model: nn.Module, x: torch.Tensor) -> None:
    """Logits depend on the image alone; the model is channels last in memory afterwards."""
    with torch.no_grad():
        with unchanged(f"{name}: the images", x):
            logits = model(x)
        require(bool(logits.isfinite().all()), f"{name} must give finite logits.")
        one_by_one = torch.cat([model(image[None]) for image in x])
        alike = torch.allclose(one_by_one, logits, atol=_ABSOLUTE, rtol=_RELATIVE)
        require(alike, f"{name}: in evaluation mode, an image's logits must not depend on the others of its batch.")
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        in_other_layout = model(x.to(memory_format=torch.channels_last))
    alike = torch.allclose(in_other_layout, logits, atol=_ABSOLUTE, rtol=_RELATIVE)
    require(alike, f"{name}: the memory layout must not matter; use flatten, not view.")


@fresh_torch_state()
@one_thread()
def check_partition(name: str, *, registry: Registry | None = None, num_examples: int = 120, **options: Any) -> None:
    """Hold a partition to its contract.

    Each client gets examples, none of them two; the same seed gives the same split, and numpy's global generator is
    left alone.

    Args:
        name: as recipes name it, also with a number (``label2``).
        registry: where it is; None: among the built-ins and what is installed.
        num_examples: how many there are to split, of six classes.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it, such as what is no split of the examples.
    """
    labels = np.random.RandomState(0).randint(0, 6, num_examples)
    state = numpy_state()
    for clients in (1, 3):
        experiment = tiny_experiment(
            registry,
            data_args={"partition_method": name},
            train_args={"client_num_in_total": clients},
            partition=options,
        )
        parts = experiment.split(labels)
        same = all(map(np.array_equal, parts, experiment.split(labels)))
        require(same, f"{name}, {clients} clients: the same seed must give the same split.")
        require(all(map(len, parts)), f"{name}, {clients} clients: each client must get examples.")
    require(numpy_state() == state, f"{name}: draw from a generator of the seed, not from numpy's global one.")


@fresh_torch_state()
@one_thread()
def check_logger(name: str, folder: Path, *, registry: Registry | None = None, **options: Any) -> Path:
    """Hold a logger to its contract: it hears of a run that finishes and of one that is stopped, and never fails.

    Args:
        name: as recipes name it.
        folder: for the run directories.
        registry: where it is; None: among the built-ins and what is installed.
        options: instead of its defaults.

    Returns:
        The directory of the finished run, for tests of what was written.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    experiment = tiny_experiment(registry, loggers=[{"name": name, **options}])
    pick = experiment.loggers[0]
    logger = pick.entry.load()(pick.options)
    has_hooks = any(hasattr(logger, hook) for hook in hookspecs.LIFE)
    require(has_hooks, f"{name}: it has none of the hooks {', '.join(hookspecs.LIFE)}.")
    rounds = 2
    per_class = (*(0.5,) * (NUM_CLASSES - 1), None)  # of the last class there is no example
    natural = EvaluationResult("natural", 12, 0.5, 0.5, per_class, per_class, {}, "calfat_plugin.testing", 0.1)
    finished = _listeners(experiment)
    run = _play_rounds(finished, experiment, folder / "finished", rounds, natural)
    finished.run_finished(run, RunResult((natural,), rounds, 2.0))
    stopped = _listeners(experiment)
    run = _play_rounds(stopped, experiment, folder / "stopped", rounds, natural)
    stopped.run_stopped(run, KeyboardInterrupt())
    return folder / "finished"


def _listeners(experiment: Experiment) -> Listeners:
    """The logger as a run calls it; what a run would only warn of is an error."""

    def refuse(warning: str) -> None:
        raise AssertionError(warning)

    return Listeners.of(experiment, refuse)


def _play_rounds(
    listeners: Listeners, experiment: Experiment, directory: Path, rounds: int, natural: EvaluationResult
) -> RunInfo:
    """Begin a run and finish its rounds, in each of which one of three clients is refused."""
    counts = ((3, 2, 1, 0),) * 3
    run = RunInfo("tiny", directory, experiment.as_run(), rounds, start_round=1, class_counts=counts)
    directory.mkdir(parents=True)
    listeners.run_started(run)
    for round in range(1, rounds + 1):
        record = RoundRecord(
            round=round,
            clients=(0, 1),
            refused={2: "of a check"},
            losses={0: 0.5, 1: 0.7},
            update_norms={0: 0.1, 1: 0.2},
            heterogeneity=0.3,
            evaluations={"natural": natural},
            seconds=1.0,
            bytes_down=10,
            bytes_up=20,
        )
        listeners.round_finished(run, record)
    return run
