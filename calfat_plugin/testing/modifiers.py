"""The check of loss modifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.registry import Registry
from calfat_plugin.runs.request import named_device
from calfat_plugin.testing.tiny import NUM_CLASSES, SIDE, TinyModel, one_thread, require, tiny_experiment, unchanged

_COUNTS = ((5, 3, 2, 1), (7, 0, 0, 2), (0, 0, 1, 0))  # of a client's labels: all classes, some, one
_LOGITS = ("attack_logits", "kl_logits", "margin_logits")
_TOLERANCE = 1e-6


@fresh_torch_state()
@one_thread()
def check_modifier(
    name: str,
    *,
    method: str = "fedpgd",
    registry: Registry | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> None:
    """Hold a loss modifier to its contract, also for clients that lack classes.

    Logits keep their shape, a loss has one value for each example, all is finite, and no example's value depends on the
    others of its batch; inputs and counts are left alone; the same counts give the same losses; a changed model
    still maps images to logits.

    Args:
        name: as recipes name it.
        method: a local trainer that it composes with.
        registry: where it is; None: among the built-ins and what is installed.
        device: where to compute, ``cpu``, ``cuda`` or ``cuda:N``.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    where = named_device(str(device), "device")
    experiment = tiny_experiment(registry, trainer={"name": method, "loss": {"name": name, **options}})
    modifier = experiment.modifier.entry.load()(experiment.modifier.options)
    with seeded_global_rng(0):
        model = modifier.adapt_model(TinyModel()).to(where)
    images = torch.rand(3, 1, SIDE, SIDE).to(where)
    shape = tuple(model(images).shape)
    require(shape == (3, NUM_CLASSES), f"{name}: the adapted model must give logits {(3, NUM_CLASSES)}; got {shape}.")
    for numbers in _COUNTS:
        counts = torch.tensor(numbers, device=where)
        who = f"{name}, counts {list(numbers)}"
        with unchanged(f"{name}: the class counts", counts):
            loss = modifier.bind(counts)
            same_loss = modifier.bind(counts)
            for operator in (*_LOGITS, "cross_entropy"):
                _check_operator(f"{who}: {operator}", operator, loss, same_loss, where)


def _check_operator(who: str, operator: str, loss: ClientLoss, same_loss: ClientLoss, device: torch.device) -> None:
    """Hold one operator of a client's loss to its contract; ``same_loss`` was bound to the same counts."""
    stream = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, NUM_CLASSES, generator=stream) * 3).to(device)
    y = torch.randint(NUM_CLASSES, (6,), generator=stream).to(device)
    if operator == "cross_entropy":
        shape: tuple[int, ...] = (6,)
    else:
        shape = (6, NUM_CLASSES)

    def value(of: ClientLoss, rows: slice = slice(None)) -> Tensor:
        if operator == "cross_entropy":
            return of.cross_entropy(logits[rows], y[rows])
        changed: Tensor = getattr(of, operator)(logits[rows])
        return changed

    with unchanged(f"{who}: its input", logits, y):
        of_batch = value(loss)
    require(tuple(of_batch.shape) == shape, f"{who} must give {shape}; got {tuple(of_batch.shape)}.")
    require(bool(of_batch.isfinite().all()), f"{who} must be finite for finite logits; got {of_batch.tolist()}.")
    of_parts = torch.cat([value(loss, slice(0, 2)), value(loss, slice(2, 6))])
    alike = torch.allclose(of_batch, of_parts, atol=_TOLERANCE)
    require(alike, f"{who}: an example's value must not depend on the others of its batch.")
    require(torch.equal(of_batch, value(same_loss)), f"{who}: the same counts must give the same values.")
