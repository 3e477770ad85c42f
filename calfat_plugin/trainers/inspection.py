"""The first mini-batches of a client's round: what was made of them lies in the budget, and nobody writes to them.

A look at values makes the host wait for a GPU, so there are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from calfat_plugin import returned
from calfat_plugin.errors import BudgetError, PluginError, UpdateError
from calfat_plugin.returned import attribute_errors_to
from calfat_plugin.trainers.batches import TrainBatch

INSPECTED = 2  #: mini-batches of a client's round: an attack that remembers may be wrong from the second one on


@contextmanager
def inspected(batch: TrainBatch, clean: Tensor, made: Tensor, number: int, *, trained: bool) -> Iterator[None]:
    """Hold a step's images to the budget, and the step inside to leaving them alone.

    ``clean`` is a copy of the clean images from before the attack, and ``made`` what the attack gave. After steps
    (``trained``) the model may have diverged: what is not finite is then left to the check of the loss.
    """
    task = batch.task
    x_nat, x_adv = batch.x_nat, batch.x_adv
    where = f"client {task.client}, round {task.round}, batch {number}"
    of_inner = ""  # the inner attack, where it made x_adv
    blaming: AbstractContextManager[None] = nullcontext()
    if task.inner.who and (task.inner.has_own_steps or x_adv is made):
        of_inner = f" of {task.inner.who}"
        blaming = attribute_errors_to(task.inner.who, type(task.inner.options))
    with blaming:
        if not torch.equal(clean, x_nat):
            raise PluginError(
                f"{where}: x_nat was changed in place while adversarial examples were made of it. Work on a copy: "
                "x_nat.clone()."
            )
        finite = bool(returned.like(x_adv, x_nat, f"{where}: x_adv is").isfinite().all())
        if not finite and not trained:
            raise UpdateError(f"{where}: the adversarial examples{of_inner} hold nan or inf.")
        if finite:
            _check_budget(batch, where)
    tensors = {"x_nat": x_nat, "x_adv": x_adv, "y": batch.y}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if not torch.equal(before[name], tensor):
            raise PluginError(f"{where}: the training step changed {name} in place. Work on a copy: {name}.clone().")
    if batch.x_adv is not x_adv and not trained:  # it put others there
        _check_budget(batch, where)


def _check_budget(batch: TrainBatch, where: str) -> None:
    try:
        batch.task.inner.reach(batch.task.threat).check(batch.x_adv.detach(), batch.x_nat, who=where)
    except BudgetError as error:
        raise PluginError(f"{error} What leaves the ball by design says how far in InnerAttack.reach.") from None
