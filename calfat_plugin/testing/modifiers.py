"""The check of loss modifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from calfat_plugin.federation.global_rng import seeded_global_rng
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import named_device
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
    shape = tuple(model(torch.rand(3, 1, SIDE, SIDE).to(where)).shape)
    require(shape == (3, NUM_CLASSES), f"{name}: the adapted model must give logits {(3, NUM_CLASSES)}; got {shape}.")
    for numbers in _COUNTS:
        counts = torch.tensor(numbers, device=where)
        with unchanged(f"{name}: the class counts", counts):
            loss, again = modifier.bind(counts), modifier.bind(counts)
            for what in (*_LOGITS, "cross_entropy"):
                _check(f"{name}, counts {list(numbers)}: {what}", what, loss, again, where)


def _check(who: str, what: str, loss: ClientLoss, again: ClientLoss, device: torch.device) -> None:
    stream = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, NUM_CLASSES, generator=stream) * 3).to(device)
    y = torch.randint(NUM_CLASSES, (6,), generator=stream).to(device)

    def value(of: ClientLoss, rows: slice) -> Tensor:
        given = (logits[rows], y[rows]) if what == "cross_entropy" else (logits[rows],)
        found: Tensor = getattr(of, what)(*given)
        return found

    with unchanged(f"{who}: its input", logits, y):
        whole = value(loss, slice(None))
    wanted = (6,) if what == "cross_entropy" else (6, NUM_CLASSES)
    require(tuple(whole.shape) == wanted, f"{who} must give {wanted}; got {tuple(whole.shape)}.")
    require(bool(whole.isfinite().all()), f"{who} must be finite for finite logits; got {whole.tolist()}.")
    parts = torch.cat([value(loss, slice(0, 2)), value(loss, slice(2, 6))])
    alike = torch.allclose(whole, parts, atol=_TOLERANCE)
    require(alike, f"{who}: an example's value must not depend on the others of its batch.")
    require(torch.equal(whole, value(again, slice(None))), f"{who}: the same counts must give the same values.")
