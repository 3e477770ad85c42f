"""The loops that are measured: the package's, a plain one, and the authors' (by path, as shipped)."""

from __future__ import annotations

import copy
import ctypes
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import wait_for
from benchmarks.work import CLEAN_ROUNDS, METHODS
from calfat_plugin.compat import make_torchvision_importable
from calfat_plugin.datasets import Augmentation, ImageData
from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.measure import clean_predictions
from calfat_plugin.interfaces import EvaluationTask, InnerAttack, LocalTask, TrainSettings
from calfat_plugin.maths.passes import MMAP_THRESHOLD, TRIM_THRESHOLD, Precision, keep_freed_memory
from calfat_plugin.models.building import seeded
from calfat_plugin.models.entries import ENTRIES as MODELS
from calfat_plugin.modifiers.counts import PLAIN
from calfat_plugin.options import NoOptions
from calfat_plugin.results import LocalUpdate
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.base import AdversarialTrainer

CIFAR = (3, 32, 32)
CLASSES = 10
BATCH = 128
SEED = 2021
EPS, STEP = 8 / 255, 2 / 255
PGD = InnerAttack()


def images(count: int, shape: tuple[int, int, int] = CIFAR) -> ImageData:
    """Noise in bytes, with every class in turn: speed does not depend on what is on a picture."""
    stream = torch.Generator().manual_seed(SEED)
    return ImageData(
        torch.randint(256, (count, *shape), generator=stream, dtype=torch.uint8), torch.arange(count) % CLASSES
    )


def network(name: str, shape: tuple[int, int, int] = CIFAR) -> nn.Module:
    """A built-in model with its default options and seeded weights, on the CPU."""
    entry = next(entry for entry in MODELS if entry.name == name)
    build = entry.load()
    model: nn.Module = seeded(lambda: build(in_channels=shape[0], image_size=shape[1:], num_classes=CLASSES), SEED)
    return model


def trainer(method: str) -> AdversarialTrainer:
    """A built-in method without a loss modifier, with the options of :data:`benchmarks.work.METHODS`."""
    entry = importlib.import_module(f"calfat_plugin.trainers.{method}").ENTRY
    made: AdversarialTrainer = entry.load()(entry.config(**METHODS[method][0]), PLAIN.load()(NoOptions()))
    return made


# --- precision --------------------------------------------------------------------------------------------------------

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


# --- the package's loop -----------------------------------------------------------------------------------------------


def evaluation_of(
    model: nn.Module, data: ImageData, threat: ThreatModel, batch_size: int, device: torch.device
) -> EvaluationTask:
    """What evaluators of this model are given, with what it says of the clean images."""
    clean = clean_predictions(model, data, num_classes=CLASSES, batch_size=batch_size, device=device)
    return EvaluationTask(model, data, CLASSES, threat, batch_size, device, SEED, 0, clean)


def task(
    model: nn.Module,
    data: ImageData,
    device: torch.device,
    *,
    steps: int = 10,
    precision: Precision = "fp32",
    epochs: int = 1,
    inner: InnerAttack = PGD,
    clean_rounds: int = 0,
) -> LocalTask:
    """One client's round, settings as in the release for CIFAR-10."""
    if precision not in PRECISIONS:
        raise SystemExit(f"--precision {precision}: this version of the package computes in {', '.join(PRECISIONS)}.")
    return LocalTask(
        model=model,
        data=data,
        class_counts=torch.bincount(data.y.cpu(), minlength=CLASSES),
        threat=ThreatModel(steps=steps),
        settings=TrainSettings(epochs, BATCH, 0.01, 0.9, 2e-3, 1),
        augment=Augmentation(crop_padding=4, flip=True) if data.x.shape[1:] == CIFAR else Augmentation(),
        device=device,
        seed=SEED,
        round=1,
        client=0,
        precision=precision,
        inner=inner,
        clean_rounds=clean_rounds,
    )


def fit(method: str, base: nn.Module, data: ImageData, device: torch.device, **how: Any) -> tuple[float, LocalUpdate]:
    """(seconds, update) of one round of a client that starts from ``base``, which stays as it is."""
    trains = trainer(method)
    model = trains.adapt_model(copy.deepcopy(base)).to(device)
    work = task(model, data, device, clean_rounds=CLEAN_ROUNDS.get(method, 0), **how)
    wait_for(device)
    started = time.perf_counter()
    update = trains.fit(work)
    wait_for(device)
    return time.perf_counter() - started, update


def ours(method: str, base: nn.Module, data: ImageData, device: torch.device, **how: Any) -> Callable[[], float]:
    """What measures the package's local epoch once."""
    return lambda: fit(method, base, data, device, **how)[0]


# --- loops of others --------------------------------------------------------------------------------------------------

_LARGEST_THRESHOLD = 32 * 2**20  # that glibc's malloc chooses by itself, from what a program frees


@contextmanager
def usual_memory() -> Iterator[None]:
    """Freed memory as the C library handles it by itself while inside, as where the package was never imported.

    The package lets the whole process keep it (``keep_freed_memory``); the loops of others are not to profit by that.
    Inside, the thresholds are as high as glibc ever sets them, so that others get the benefit of the doubt.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is not None and trim is not None:
        mallopt(TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        mallopt(MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        trim(0)
    try:
        yield
    finally:
        keep_freed_memory.cache_clear()  # the next pass of the package sets it again


# --- a plain loop -----------------------------------------------------------------------------------------------------


def plain(base: nn.Module, data: ImageData, device: torch.device, *, steps: int = 10) -> Callable[[], float]:
    """What measures CalFAT once as it is commonly written: a loader, both branches anew in each step, no care taken.

    For models that the authors' code does not have.
    """
    examples = TensorDataset(pixels(data.x), data.y)
    prior = 0.1 * torch.log(torch.bincount(data.y.cpu(), minlength=CLASSES).float() + 1e-7).to(device)

    def attacked(model: nn.Module, x: Tensor) -> Tensor:
        model.eval()
        x_adv = x + 0.001 * torch.randn_like(x)
        for _ in range(steps):
            x_adv.requires_grad_()
            divergence = F.kl_div(
                F.log_softmax(model(x_adv) + prior, dim=1), F.softmax(model(x) + prior, dim=1), reduction="sum"
            )
            (gradient,) = torch.autograd.grad(divergence, x_adv)
            x_adv = x_adv.detach() + STEP * gradient.sign()
            x_adv = torch.min(torch.max(x_adv, x - EPS), x + EPS).clamp(0, 1)
        return x_adv

    @usual_memory()
    def measure() -> float:
        model = copy.deepcopy(base).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=2e-3)
        wait_for(device)
        started = time.perf_counter()
        for x, y in DataLoader(examples, batch_size=BATCH, shuffle=True):
            x, y = x.to(device), y.to(device)
            x_adv = attacked(model, x)
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(10 * (model(x_adv) + prior), y).backward()
            optimizer.step()
        wait_for(device)
        return time.perf_counter() - started

    return measure


# --- the authors' loop ------------------------------------------------------------------------------------------------


class Official:
    """``fat.py`` of a checkout of cc233/CalFAT, imported and called as it is; nothing of it is written here.

    It moves everything to a GPU. Where ``device`` is the CPU, ``.cuda()`` leaves tensors and modules where they are.
    It imports tensorboardX, which only its main program uses; a machine without that gets an empty module.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.device = device
        make_torchvision_importable()
        if "tensorboardX" not in sys.modules and importlib.util.find_spec("tensorboardX") is None:
            sys.modules["tensorboardX"] = _empty("tensorboardX")
        words = ["fat.py", "--dataset=cifar10", "--lr=0.01", f"--local_bs={BATCH}", "--local_ep=1"]
        with mock.patch.object(sys, "path", [str(path), *sys.path]), mock.patch.object(sys, "argv", words):
            self.fat, self.utils = importlib.import_module("fat"), importlib.import_module("utils")
        if Path(str(self.fat.__file__)).parent != path or Path(str(self.utils.__file__)).parent != path:
            raise SystemExit(f"--official: a module named fat or utils was imported before, not those of {path}")

    def local_epoch(self, data: ImageData) -> Callable[[], float]:
        """What measures one local epoch of its CalFAT once, on its own network."""
        examples = TensorDataset(pixels(data.x.cpu()), data.y.cpu())

        def measure() -> float:
            with self._on_device():
                self.fat.args.cls_num_list = torch.bincount(data.y.cpu(), minlength=CLASSES).tolist()
                client = self.fat.LocalUpdate(args=self.fat.args, dataset=examples, idxs=range(len(data)))
                model = self.fat.get_model(self.fat.args)
                wait_for(self.device)
                started = time.perf_counter()
                client.pgd_train(model, None)
                wait_for(self.device)
                return time.perf_counter() - started

        return measure

    def evaluation(self, weights: nn.Module, data: ImageData) -> Callable[[], tuple[float, float]]:
        """What measures (seconds, accuracy under its PGD-20) once, its network having the weights of our ``cnn``."""
        loader = DataLoader(
            TensorDataset(pixels(data.x.cpu()), data.y.cpu()), batch_size=256, shuffle=False, num_workers=4
        )

        def measure() -> tuple[float, float]:
            with self._on_device():
                model = self.fat.get_model(self.fat.args)
                model.load_state_dict(dict(zip(model.state_dict(), weights.state_dict().values(), strict=True)))
                wait_for(self.device)
                started = time.perf_counter()
                _, wrong = self.utils.eval_adv_test_whitebox(model, loader, self.fat.cfgs, "cifar10")
                wait_for(self.device)
                return time.perf_counter() - started, 1 - float(wrong) / len(data)

        return measure

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                yield
            return

        def stay(self: Any, *args: Any, **keywords: Any) -> Any:
            return self

        with usual_memory(), mock.patch.object(Tensor, "cuda", stay), mock.patch.object(nn.Module, "cuda", stay):
            yield


def _empty(name: str) -> ModuleType:
    module = ModuleType(name)
    module.SummaryWriter = None  # type: ignore[attr-defined]
    return module
