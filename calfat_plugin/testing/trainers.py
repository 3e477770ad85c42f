"""The checks of training methods, with the attack inside them where that is the loop's, and of loss modifiers."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from calfat_plugin.experiment import defined_modifiers
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.interfaces import ClientLoss, LocalTask, LocalTrainer, TrainBatch
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.maths.tied import each_once, load_state, state_of
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate
from calfat_plugin.runs.request import named_device
from calfat_plugin.seeds import derive_seed
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import (
    NUM_CLASSES,
    SETTINGS,
    SIDE,
    TinyModel,
    answered,
    balanced_model,
    in_each_norm,
    numpy_state,
    one_thread,
    require,
    same_bits,
    tiny_experiment,
    tiny_images,
    tiny_task,
    unchanged,
)
from calfat_plugin.trainers.base import AdversarialTrainer

_PARTS = ("state", "extras", "client_state")
_LEARNING = dataclasses.replace(SETTINGS, epochs=20, batch_size=20, learning_rate=0.02, momentum=0.0, weight_decay=0.0)
# --- of loss modifiers ---
_COUNTS = ((5, 3, 2, 1), (7, 0, 0, 2), (0, 0, 1, 0))  # of a client's labels: all classes, some, one
_LOGITS = ("attack_logits", "kl_logits", "margin_logits")
_TOLERANCE = 1e-6


@fresh_torch_state()
@one_thread()
def check_trainer(
    name: str,
    *,
    registry: Registry | None = None,
    device: str | torch.device = "cpu",
    losses: tuple[str, ...] | None = None,
    **options: Any,
) -> None:
    """Hold a training method to its contract, with each loss modifier that it composes with.

    Its update has the model's tensors, finite, and trains them: small steps of plain SGD lower the cross-entropy of the
    client's images. Its numbers are finite. The same task gives the same bits whoever was trained in between; another
    seed, round or client gives others. Data, counts, what the client keeps and what the server sent are left alone. A
    client with one example trains, too; a federation of two rounds goes through, and is resumed to the same bits.

    Of an ``AdversarialTrainer`` also, in each norm that the method takes: every adversarial example lies inside the
    budget; the attack leaves clean images, model and global random generators alone, moves its start, and costs the
    method's own training loss no less than random noise does.

    Args:
        name: as recipes name it.
        registry: where it is; None: among the built-ins and what is installed.
        device: where to train, ``cpu``, ``cuda`` or ``cuda:N``.
        losses: modifiers to check with; None: all that it supports. Ignored where it has its own loss.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    where = named_device(str(device), "device")
    first = tiny_experiment(registry, trainer={"name": name, **options})
    defined = defined_modifiers(first.registry, first.trainer.entry)
    if defined and losses is not None:
        unknown = set(losses).difference(defined)
        require(not unknown, f"{name} does not compose with {', '.join(sorted(unknown))}.")
    for loss in defined:
        if losses is None or loss in losses:
            _check_composed({"name": name, "loss": loss, **options}, first.registry, where, f"{name} with {loss}")
    if not defined:
        _check_composed({"name": name, **options}, first.registry, where, name)


def _check_composed(recipe: dict[str, Any], registry: Registry, device: torch.device, who: str) -> None:
    experiment = tiny_experiment(registry, trainer=recipe)
    trainer = experiment.build_trainer()
    update = _check_update(trainer, device, who)
    _check_streams(trainer, update, device, who)
    _check_learning(trainer, device, who)
    if isinstance(trainer.plugin, AdversarialTrainer):
        for in_norm in in_each_norm(registry, trainer=recipe):
            # Many small steps: a large one downhill ends high up on the other side.
            budget = in_norm.threat
            threat = dataclasses.replace(budget, steps=20, step_size=budget.eps / 10)
            attacking = in_norm.build_trainer()
            assert isinstance(attacking.plugin, AdversarialTrainer)
            data = answered(adapted(attacking, balanced_model()))
            settings = dataclasses.replace(SETTINGS, batch_size=len(data))  # an epoch is one batch
            task = tiny_task(balanced_model(), data, threat=threat, settings=settings, device=device)
            train = partial(trained, attacking, task)
            examples = check_attack(attacking.plugin, train, f"{who}, {threat.norm}")
            text = f"an epoch must train on all {len(data)} examples; it trained on {examples}."
            require(examples >= len(data), f"{who}: {text}")
    one = trained(trainer, tiny_task(data=tiny_images(2, 1), device=device))
    check_update(one.state, state_of(adapted(trainer)), who=f"{who}, a client with one example")
    check_federation(experiment, device)


def _check_update(trainer: LocalTrainer, device: torch.device, who: str) -> LocalUpdate:
    """The update of a first round, and that neither it nor a second one changes what it is given."""
    task = tiny_task(device=device)
    with unchanged("the client's data", task.data.x, task.data.y, task.class_counts):
        update = trained(trainer, task)
    check_update(update.state, state_of(adapted(trainer)), who=who)
    require(update.num_examples == len(task.data), f"{who}: num_examples must be {len(task.data)}, the client's.")
    moved = any(not torch.equal(update.state[key], tensor) for key, tensor in state_of(adapted(trainer)).items())
    require(moved, f"{who}: a round of training must change the model; no tensor changed.")
    metrics = dict(update.metrics)
    numbers = "loss" in metrics and all(map(math.isfinite, metrics.values()))
    require(numbers, f"{who}: metrics must be finite numbers with the training loss as 'loss'; got {metrics}.")
    broadcast = trainer.broadcast({0: update})
    later = tiny_task(round=2, client_state=update.client_state, broadcast=broadcast, device=device)
    client_state = unchanged(f"{who}: what the client keeps", *later.client_state.values())
    broadcast_state = unchanged(f"{who}: what the server sends", *later.broadcast.values())
    with client_state, broadcast_state:
        trained(trainer, later)
    return update


def _check_streams(trainer: LocalTrainer, update: LocalUpdate, device: torch.device, who: str) -> None:
    """All randomness comes from the task's seed, round and client."""
    trained(trainer, tiny_task(TinyModel(1), tiny_images(1, 7), client=1, round=2, device=device))
    again = trained(trainer, tiny_task(device=device))
    for part in _PARTS:
        same = same_bits(getattr(update, part), getattr(again, part))
        require(same, f"{who}: the same task must give the same {part}, whichever client was trained in between.")
    require(update.metrics == again.metrics, f"{who}: the same task must give the same metrics.")
    for name in ("seed", "round", "client"):
        other_task = dataclasses.replace(tiny_task(device=device), **{name: 2})  # type: ignore[arg-type]
        same = same_bits(update.state, trained(trainer, other_task).state)
        require(not same, f"{who}: another {name} must give other batches; derive every stream from the task's {name}.")


def _check_learning(trainer: LocalTrainer, device: torch.device, who: str) -> None:
    """Small steps on all of the client's images at once make them less wrong, whatever the method's loss is."""
    data = tiny_images(3, 20)
    model = adapted(trainer)

    def loss() -> float:
        with torch.no_grad():
            return float(cross_entropy(model.eval()(data.x), data.y))

    before = loss()
    load_state(model, trained(trainer, tiny_task(data=data, settings=_LEARNING, device=device)).state)
    after = loss()
    require(
        after < before,
        f"{who}: training must lower the cross-entropy of the client's images, which went from {before:.3g} to "
        f"{after:.3g} in {_LEARNING.epochs} small steps. Has train_loss, or the step, the wrong sign?",
    )


def adapted(trainer: LocalTrainer, model: nn.Module | None = None) -> nn.Module:
    """A model, default: a ``TinyModel``, as the method changes it."""
    with seeded_global_rng(0):
        if model is None:
            model = TinyModel()
        return trainer.adapt_model(model)


def trained(trainer: LocalTrainer, task: LocalTask) -> LocalUpdate:
    """The update of one client, under global generators seeded as a run does."""
    model = adapted(trainer, task.model.cpu()).to(task.device)  # in this order, as in a run
    with seeded_global_rng(derive_seed(task.seed, "ambient", round=task.round, client=task.client)):
        update = trainer.fit(dataclasses.replace(task, model=model, personal=trainer.personal_names(model)))
    update = dataclasses.replace(update, state=each_once(update.state, model, who="the update"))
    sent = [*update.state.values(), *update.extras.values(), *update.client_state.values()]
    # The next client is trained in the same model.
    copies = unchanged("an update must hold copies: tensors of the model, which is trained on,", *sent)
    with copies, torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return update


def check_attack(trainer: AdversarialTrainer, train: Callable[[], object], who: str) -> int:
    """Look at every batch that a method trains on; how many examples it trained on.

    Its examples lie inside the budget. The attack leaves the clean images, the model and the global random generators
    as they are; it moves its start, and its points cost the method's own training loss no less than random ones.

    Args:
        train: trains with it, on images that the model gets right: what leaves the model's answer leaves the label.
        who: the method, as messages name it.
    """
    watch = _Watch(who, trainer.start, trainer.backward, trainer.train_loss)
    with mock.patch.multiple(trainer, start=watch.started, backward=watch.stepped, train_loss=watch.lost):
        train()
    return watch.examples


@dataclass
class _Watch:
    """Stands in front of a method's own hooks."""

    who: str
    start: Callable[[Tensor, LocalTask, torch.Generator], Tensor]
    backward: Callable[[TrainBatch], Tensor]
    train_loss: Callable[[TrainBatch], Tensor]
    examples: int = 0
    #: What the attack of a batch began with, until its first step: clean images, start, and what is around the model.
    begun: tuple[Tensor, Tensor, dict[str, object]] | None = None

    def started(self, x_nat: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
        x_clean = x_nat.clone()
        before = around(task.model)
        start = self.start(x_nat, task, generator)
        self.begun = (x_clean, start.clone(), before)
        return start

    def lost(self, batch: TrainBatch) -> Tensor:
        batch.task.inner.reach(batch.task.threat).check(batch.x_adv, batch.x_nat, who=self.who)
        return self.train_loss(batch)

    def stepped(self, batch: TrainBatch) -> Tensor:
        if self.begun is not None:
            self._check_attack(*self.begun, batch)
            self.begun = None
        batch.task.inner.reach(batch.task.threat).check(batch.x_adv, batch.x_nat, who=self.who)
        self.examples += len(batch.y)
        return self.backward(batch)

    def _check_attack(self, x_nat: Tensor, start: Tensor, before: dict[str, object], batch: TrainBatch) -> None:
        """Hold the attack of a batch to its contract, at the first step after it."""
        for name, state in around(batch.model).items():
            require(state == before[name], f"{self.who}: the attack must leave {name} as it found them.")
        attacked = batch.attacked
        if attacked is None:
            attacked = torch.ones_like(batch.y, dtype=torch.bool)
        reach = batch.task.inner.reach(batch.task.threat)
        unmoved = batch.x_nat.clone()
        unmoved[attacked] = reach.project(start, x_nat)
        moved = not torch.equal(unmoved, batch.x_adv)
        require(moved, f"{self.who}: the attack must move its start; attack_loss has no gradient there.")
        noise = batch.x_nat.clone()
        noise[attacked] = reach.random_start(x_nat, torch.Generator().manual_seed(0))
        loss_of_noise = self._loss_at(batch, noise)
        loss_of_attack = self._loss_at(batch, batch.x_adv)
        require(
            loss_of_attack >= loss_of_noise,
            f"{self.who}: the attack must cost the training loss no less than random noise does in the budget: it "
            f"makes it {loss_of_attack:.3g}, noise {loss_of_noise:.3g}. The loop climbs attack_loss: has a loss the "
            "wrong sign?",
        )

    def _loss_at(self, batch: TrainBatch, x_adv: Tensor) -> float:
        """The training loss of these adversarial examples, (N, C, H, W), as the attack sees the model."""
        with attack_mode(batch.model), torch.no_grad():
            return float(self.train_loss(batch.again(x_adv)))


def around(model: nn.Module) -> dict[str, object]:
    """What an attack must leave as it is, by what messages call it."""
    return {
        "the model's tensors": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "the global random generators": (random.getstate(), numpy_state(), torch.get_rng_state().tolist()),
    }


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
