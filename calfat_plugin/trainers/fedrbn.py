"""FedRBN: robustness propagated through batch statistics (Hong et al., AAAI 2023).

Clients of role ``at`` train adversarially and own statistics of adversarial inputs (the noise branch); clients of role
``st`` do not, and borrow them. All tensors of the dual normalisation are personal. The server sends along the ``at``
clients' statistics, and each ``st`` client works out its own mixture of them: the same numbers as if the server did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import LocalTask, LocalTrainer, State, TrainBatch
from calfat_plugin.options import option
from calfat_plugin.trainers.base import AdversarialTrainer

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from calfat_plugin.recipe.schema import Recipe
    from calfat_plugin.results import LocalUpdate

_SENT = "fedrbn/at/"  # broadcast: fedrbn/at/<client>/<tensor>
_CLEAN_MEAN = ".clean.running_mean"
_STATISTIC = re.compile(r"\.(clean|noise)\.running_(mean|var)$")
_CLIP_NORM = 10.0  # of the gradient through the frozen noise branch
_TEMPERATURE = 0.01  # of the softmax over similarities: the most similar at client counts most


@dataclass(frozen=True)
class FedRBNOptions:
    """The constants of FedRBN, and who trains adversarially."""

    at_fraction: float = option(
        1.0, low=0, open_low=True, high=1, help="share of clients that train adversarially, spread evenly over the ids"
    )
    role: Literal["at", "st"] | None = option(
        None, help="the same role for all who train with these options, such as a group of clients; null: by roles"
    )
    roles: str | None = option(
        None, help="role of each client in turn, at or st, such as 'at st st st st'; null: by at_fraction"
    )
    lam: float = option(0.5, low=0, high=1, help="weight of the adversarial loss on at clients; the rest is clean")
    pnc: float = option(
        0.5, low=0, high=1, help="weight of the loss through the frozen noise branch on st clients; 0: none"
    )
    pnc_warmup: int = option(10, low=0, help="rounds before pnc sets in", unit="rounds")
    similarity: Literal["cosine", "equal"] = option(
        "cosine", help="how st clients weigh the at clients' statistics: by likeness of the clean ones, or all alike"
    )
    debias: float = option(0.0, low=0, help="how far borrowed statistics move along the difference of the clean ones")

    def __post_init__(self) -> None:
        if self.roles is None:
            return
        if self.role is not None:
            raise OptionError("role and roles: both say who trains adversarially; keep one of the two.")
        words = self.roles.split()
        for word in words:
            if word not in ("at", "st"):
                raise OptionError(f"roles: got '{word}' in '{self.roles}', expected at or st for each client.")
        if "at" not in words:
            raise OptionError(f"roles: got '{self.roles}', expected at least one client of role at.")

    @property
    def some_borrow(self) -> bool:
        """Whether any client that these options are for can have the role ``st``, in this round or another."""
        if self.role is not None:
            return self.role == "st"
        if self.roles is not None:
            return "st" in self.roles.split()
        return self.at_fraction < 1

    def trains_adversarially(self, client: int) -> bool:
        """Whether a client's role is ``at``; a function of the options and its 0-based id, so all parties agree."""
        if self.role is not None:
            return self.role == "at"
        if self.roles is not None:
            return self.roles.split()[client : client + 1] == ["at"]  # too few are refused, maybe after this was asked
        return self._adversarial_among(client + 1) > self._adversarial_among(client)

    def _adversarial_among(self, clients: int) -> int:
        """How many of the first clients train adversarially by ``at_fraction``."""
        # 0.29 * 100 is 28.999999999999996; the slack makes it the 29 that was meant.
        return math.floor(self.at_fraction * clients + 1e-9)


class FedRBN(AdversarialTrainer):
    """``at``: (1 - lam) CE(f_clean(x)) + lam CE(f_noise(x~)).

    ``st``: (1 - pnc) CE(f_clean(x)) + pnc CE(f_noise(x)), noise branch frozen, and that part's gradient clipped.
    """

    options: FedRBNOptions

    # --- what is different about the model ----------------------------------------------------------------------------

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from calfat_plugin.models.norms import with_dual_norms

        return with_dual_norms(super().adapt_model(model))

    def personal_names(self, model: nn.Module) -> frozenset[str]:
        from calfat_plugin.models.norms import dual_norms

        names: set[str] = set()
        for name, norm in dual_norms(model).items():
            names.update(f"{name}.{tensor}" for tensor in norm.state_dict())
        return frozenset(names)

    # --- one client ---------------------------------------------------------------------------------------------------

    def begin_round(self, task: LocalTask) -> None:
        """Give an ``st`` client the noise statistics that it borrows."""
        from calfat_plugin.maths.tied import state_of

        if not self.options.trains_adversarially(task.client):
            state = {name: tensor.cpu() for name, tensor in state_of(task.model).items()}
            task.model.load_state_dict(_lent(state, _received(task.broadcast), self.options), strict=False)

    def attacked_rows(self, index: Tensor, task: LocalTask, generator: Generator) -> Tensor | None:
        if self.options.trains_adversarially(task.client):
            return None  # all
        return index < 0  # none

    def train_loss(self, batch: TrainBatch) -> Tensor:
        clean = self._clean_loss(batch)
        if not self.options.trains_adversarially(batch.task.client):
            return clean
        adversarial = batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()
        return (1 - self.options.lam) * clean + self.options.lam * adversarial

    def backward(self, batch: TrainBatch) -> Tensor:
        options, task = self.options, batch.task
        if options.trains_adversarially(task.client) or options.pnc == 0 or task.round <= options.pnc_warmup:
            return super().backward(batch)
        from calfat_plugin.models.norms import using_branch

        clean = (1 - options.pnc) * self._clean_loss(batch)
        with using_branch(batch.model, "noise", frozen=True):
            borrowed = options.pnc * batch.loss.cross_entropy(batch.model(batch.x_nat), batch.y).mean()
        borrowed.backward()
        _clip_gradients(batch.model, _CLIP_NORM)
        clean.backward()  # added to the clipped part
        return (clean + borrowed).detach()

    @staticmethod
    def _clean_loss(batch: TrainBatch) -> Tensor:
        from calfat_plugin.models.norms import using_branch

        with using_branch(batch.model, "clean"):
            return batch.loss.cross_entropy(batch.model(batch.x_nat), batch.y).mean()

    # --- the server's part --------------------------------------------------------------------------------------------

    _others: Mapping[int, LocalTrainer] = MappingProxyType({})

    def among(self, others: Mapping[int, LocalTrainer]) -> FedRBN:
        trainer = copy(self)
        trainer._others = others
        return trainer

    def _options_of(self, client: int) -> FedRBNOptions:
        options: FedRBNOptions = getattr(self._others.get(client, self), "options", self.options)
        return options

    def broadcast(self, updates: Mapping[int, LocalUpdate]) -> dict[str, Tensor]:
        some_borrow = any(self._options_of(client).some_borrow for client in self._others)
        if not (self.options.some_borrow or some_borrow):
            return {}
        statistics = {}  # also after a round of at clients alone: other clients may train in the next one
        for client, state in self._sources(updates).items():
            for name, tensor in state.items():
                if _STATISTIC.search(name):
                    statistics[f"{_SENT}{client}/{name}"] = tensor
        return statistics

    def evaluated_personal(self, updates: Mapping[int, LocalUpdate], names: Sequence[str]) -> dict[str, Tensor]:
        """Uniform mean over clients, after ``st`` clients got this round's noise statistics."""
        from calfat_plugin.maths.averaging import weighted_average

        sources = list(self._sources(updates).values())
        states = []
        for client, update in updates.items():
            personal = {name: update.state[name] for name in names}
            options = self._options_of(client)
            if not options.trains_adversarially(client):
                personal |= _lent(personal, sources, options)
            states.append(personal)
        return weighted_average(states, [1.0] * len(states))

    def _sources(self, updates: Mapping[int, LocalUpdate]) -> dict[int, State]:
        """Client to state, of role ``at``."""
        states = {}
        for client, update in updates.items():
            if self._options_of(client).trains_adversarially(client):
                states[client] = update.state
        return states


def _lent(state: State, sources: Sequence[State], options: FedRBNOptions) -> dict[str, Tensor]:
    """The noise statistics that an ``st`` client borrows: a mean in float64; of one ``at`` client bit for bit."""
    from calfat_plugin.maths.averaging import weighted_sum

    if not sources:
        return {}
    weights = [1 / len(sources)] * len(sources)
    if options.similarity == "cosine":
        weights = propagation_weights(state, sources)
    lent = {}
    debias = options.debias
    for layer in _layers(state):
        clean_mean, noise_mean = f"{layer}.clean.running_mean", f"{layer}.noise.running_mean"
        clean_var, noise_var = f"{layer}.clean.running_var", f"{layer}.noise.running_var"
        means = []
        variances = []
        for source in sources:
            mean = source[noise_mean]
            variance = source[noise_var]
            if debias:  # moved by the difference of the clean statistics
                mean = mean + debias * (state[clean_mean] - source[clean_mean])
                variance = variance * (state[clean_var] / source[clean_var]).pow(debias)
            means.append(mean)
            variances.append(variance)
        lent[noise_mean] = weighted_sum(means, weights)
        lent[noise_var] = weighted_sum(variances, weights)
    return lent


def _clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale all gradients down together where their joint Euclidean norm exceeds ``max_norm``."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = [gradient.square().sum() for gradient in gradients]
    norm = sum(squares[1:], start=squares[0]).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def propagation_weights(state: State, sources: Sequence[State]) -> list[float]:
    """How much an ``st`` client borrows from each ``at`` client, by their clean statistics; at least one, sum 1.

    Softmax of the layers' mean similarity [cos(mean, mean') + cos(var, var')] / (2 * temperature).
    """
    layers = _layers(state)
    scores = []
    for source in sources:
        similarities = []
        for layer in layers:
            mean, var = f"{layer}.clean.running_mean", f"{layer}.clean.running_var"
            similarities.append((_cosine(state[mean], source[mean]) + _cosine(state[var], source[var])) / 2)
        scores.append(math.fsum(similarities) / (len(layers) * _TEMPERATURE))
    best = max(scores)
    exponentials = [math.exp(score - best) for score in scores]
    total = math.fsum(exponentials)
    return [exponential / total for exponential in exponentials]


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-30))


def _layers(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(_CLEAN_MEAN) for name in names if name.endswith(_CLEAN_MEAN)]


def _received(broadcast: State) -> list[State]:
    """The ``at`` clients' statistics in the server's message, in order of the clients' ids."""
    by_client: dict[int, dict[str, Tensor]] = {}
    for key, tensor in broadcast.items():
        if key.startswith(_SENT):
            client, name = key.removeprefix(_SENT).split("/", 1)
            by_client.setdefault(int(client), {})[name] = tensor.cpu()
    return [by_client[client] for client in sorted(by_client)]


def _check(options: FedRBNOptions, recipe: Recipe) -> None:
    clients = recipe.train.client_num_in_total
    roles = options.roles
    if roles is not None and len(roles.split()) != clients:
        raise OptionError(
            f"roles: got {len(roles.split())} roles in '{roles}', expected one for each of the {clients} clients "
            "(train_args.client_num_in_total)."
        )
    if options.role is None and not any(options.trains_adversarially(client) for client in range(clients)):
        raise OptionError(
            f"at_fraction: got {options.at_fraction:g}, which leaves none of the {clients} clients to train "
            f"adversarially; expected at least {1 / clients:g}."
        )
    if not _may_train_adversarially(recipe):
        raise OptionError("role: every client has the role st; expected others, in calfat.clients, with the role at.")


def _may_train_adversarially(recipe: Recipe) -> bool:
    """Whether any client has the role ``at``, or trains by another method, as far as the recipe says who trains how."""
    options_of_client = {}  # of clients in groups that name them
    options_of_any = []  # of groups whose clients are drawn
    for group in recipe.clients:
        if group.ids is None:
            options_of_any.append(group.recipe.trainer.options)
        for client in group.ids or ():
            options_of_client[client] = group.recipe.trainer.options
    for client in range(recipe.train.client_num_in_total):
        options = options_of_client.get(client, recipe.trainer.options)
        for possible in (options, *options_of_any):
            if not isinstance(possible, FedRBNOptions) or possible.trains_adversarially(client):
                return True
    return False


def _idle(options: FedRBNOptions) -> dict[str, str]:
    if options.some_borrow:
        return {}
    borrowed = ("pnc", "pnc_warmup", "similarity", "debias")
    return dict.fromkeys(borrowed, "no client that trains by these options has the role st.")


ENTRY = TrainerEntry(
    "fedrbn",
    build=FedRBN,
    config=FedRBNOptions,
    reshapes=True,
    check=_check,
    idle=_idle,
    summary="dual batch normalisation; clients that train adversarially lend their statistics to those that do not",
    formula="at: min (1 - lam) CE(f_clean(x), y) + lam CE(f_noise(x~), y), x~ = argmax CE(f_noise(x'), y); "
    "st: min (1 - pnc) CE(f_clean(x), y) + pnc CE(f_noise(x), y), noise branch frozen",
    modifiers=("plain",),
    citation=paper("hong2023federated"),
)
