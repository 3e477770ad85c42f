"""What ``benchmarks.gpu`` compares: a GPU's results with the CPU's."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import SEED, evaluation_of, fit, images, network
from benchmarks.measuring import wait_for
from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.maths.attacks import attack_mode, gradient_ascent
from calfat_plugin.maths.passes import Precision, float32_as, passes_in
from calfat_plugin.threat import ThreatModel

CPU = torch.device("cpu")
EVALUATED_AT_ONCE = 250

#: What a GPU may differ by from the CPU's float32. Its kernels add in another order. A gradient may then take another
#: branch at a relu or a pooling, and an attack's sign another step; in tf32 so many do that the gradient of single
#: images is off by some 5 % (rounding to 10 bits on a CPU gives the same), while the loss that is reached is not.
#: Training methods draw the attack's start on the device that trains: other noise, the same distribution.
TOLERANCES: dict[str, dict[Precision, float]] = {
    "logits, relative": {"fp32": 1e-5, "tf32": 5e-3},
    "gradient of the images, relative": {"fp32": 3e-3, "tf32": 0.2},
    "loss that ten steps reach, relative": {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2},
    "PGD-20 verdicts that differ, share": {"fp32": 0.005},
    "update of a clean epoch, relative": {"fp32": 3e-3, "tf32": 0.3, "bf16": 0.6},
}
LOSS_TOLERANCE = 0.05  # of a method's mean loss, relative


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected.cpu().double()).norm() / expected.cpu().double().norm())


def differences(device: torch.device, count: int, precision: Precision) -> Iterator[tuple[str, float, float]]:
    """(result, difference, what is allowed) of ``device`` in ``precision`` from the CPU in float32."""
    base, data = network("cnn"), images(count)
    expected = results_on(CPU, base, data, "fp32")
    with float32_as(precision, device):
        found = results_on(device, base, data, precision)
    for name, allowed in TOLERANCES.items():
        if precision not in allowed:
            continue
        if found[name].dtype == torch.bool:
            off = float((found[name] != expected[name]).double().mean())
        else:
            off = relative(found[name], expected[name])
        yield name, off, allowed[precision]


def results_on(device: torch.device, base: nn.Module, data: ImageData, precision: Precision) -> dict[str, Tensor]:
    """What :data:`TOLERANCES` compare, computed on ``device`` from the same weights, images and starts."""
    model = copy.deepcopy(base).to(device).eval()
    x, y = pixels(data.x).to(device), data.y.to(device)
    threat = ThreatModel()
    start = x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(SEED)).to(device)
    seen = x.clone().requires_grad_()

    def climb(out: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), y, reduction="sum")

    with attack_mode(model):
        logits = model(seen)
        (gradient,) = torch.autograd.grad(climb(logits), seen)
        x_adv = gradient_ascent(
            model,
            x,
            climb,
            threat=threat,
            steps=10,
            step_size=float(threat.step_size),
            start=start,
            passes=passes_in(precision, device),
        )
        with torch.no_grad():
            reached = F.cross_entropy(model(x_adv), y)
    verdicts = torch.ones(len(y), dtype=torch.bool)

    def note(where: Tensor, points: Tensor) -> None:
        with torch.no_grad():
            verdicts[where] = model(points).argmax(1).cpu() == data.y[where.cpu()]

    task = evaluation_of(model, data.to(device), threat, EVALUATED_AT_ONCE, device)
    measure(replace(task, on_examples=note), [("pgd20", PGD(PGDOptions()))])
    return {
        "logits, relative": logits.detach().cpu(),
        "gradient of the images, relative": gradient.cpu(),
        "loss that ten steps reach, relative": reached.cpu().reshape(1),
        "PGD-20 verdicts that differ, share": verdicts,
        "update of a clean epoch, relative": moved("standard", base, data, device, precision),
    }


def moved(
    method: str,
    base: nn.Module,
    data: ImageData,
    device: torch.device,
    precision: Precision,
) -> Tensor:
    """The update of one client as one vector."""
    _, update = fit(method, base, data, device, precision=precision)
    known = base.state_dict()
    parts = [
        state - known[name] if name in known else state
        for name, state in update.state.items()
        if state.is_floating_point()
    ]
    return torch.cat([part.flatten() for part in parts])


def evaluated(device: torch.device, count: int) -> float:
    """Seconds of PGD-20 on so many images."""
    model, data = network("cnn").to(device).eval(), images(count).to(device)
    wait_for(device)
    started = time.perf_counter()
    measure(evaluation_of(model, data, ThreatModel(), EVALUATED_AT_ONCE, device), [("pgd20", PGD(PGDOptions()))])
    wait_for(device)
    return time.perf_counter() - started
