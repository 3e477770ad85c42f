"""The experiment: everything that a run needs to know, and how its parts are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from calfat_plugin import entries, returned
from calfat_plugin.datasets import Dataset
from calfat_plugin.datasets.data import prepared
from calfat_plugin.datasets.findings import BOTH_SPLITS
from calfat_plugin.disk import expanded
from calfat_plugin.entries import kind_of
from calfat_plugin.errors import CalfatError, DataError, OptionError, PluginError
from calfat_plugin.experiment.building import build_plugin, check_class, checked_split
from calfat_plugin.experiment.checked import (
    CheckedAggregator,
    CheckedEvaluator,
    CheckedInnerAttack,
    CheckedModifier,
    CheckedTrainer,
)
from calfat_plugin.interfaces import (
    Aggregator,
    Evaluator,
    InnerAttack,
    LocalTrainer,
    LossModifier,
    SetUpTask,
    TrainSettings,
)
from calfat_plugin.recipe.clients import CLIENTS, GROUPED, OTHERS, GroupOptions
from calfat_plugin.recipe.document import KeyPath, dotted
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.silo import SILO, for_rank
from calfat_plugin.recipe.training import AWPOptions
from calfat_plugin.registry import Registry
from calfat_plugin.returned import attribute_errors_to
from calfat_plugin.rounds_csv import columns_of
from calfat_plugin.seeds import derive_seed
from calfat_plugin.trainers.base import AdversarialTrainer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from calfat_plugin.models.building import ImageShape

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Experiment(Recipe):
    """A recipe with the registry that its names were looked up in: everything a run needs, nothing of it loaded yet."""

    registry: Registry

    @property
    def training_step_problems(self) -> dict[str, list[tuple[KeyPath, str]]]:
        """Why the attack of training, or of a group's, searches its ball badly, to (key, whose training) of each."""
        everyone: list[tuple[KeyPath, str, Experiment]] = [(("calfat", "threat"), "training", self)]
        for group in self.clients:
            everyone.append((group.path, f"training of {group.name}", self.trained_by(group)))
        problems: dict[str, list[tuple[KeyPath, str]]] = {}
        for path, whose, trained in everyone:
            if trained.trains_attacked and trained.threat.own_steps is None:
                problem = trained.threat.step_problem()
                if problem:
                    problems.setdefault(problem, []).append((path, whose))
        return problems

    @property
    def trains_attacked(self) -> bool:
        """Whether the method attacks; assumed of a method that is imported only when a run starts."""
        return bool(getattr(self.trainer.entry.build, "attacks", True))

    @property
    def metric_columns(self) -> tuple[str, ...]:
        """The columns of ``rounds.csv`` with metrics of plugins: ``train/margin``, ``pgd20/ece``."""
        return self._metrics(self.monitor.evaluators)

    @property
    def final_metrics(self) -> tuple[str, ...]:
        """The metrics of a finished run beside accuracies: of the last round, and of the final evaluators."""
        columns = [column.name for column in columns_of(()) if column.in_results]
        return (*columns, *self._metrics(self.evaluators))

    def _metrics(self, evaluators: tuple[Plugin[entries.EvaluatorEntry], ...]) -> tuple[str, ...]:
        """Columns for what these evaluators, and the plugins of training, measure; then those of the groups."""
        measuring: list[tuple[str, Plugin[Any]]] = [("train", self.trainer)]
        measuring += [("train", group.recipe.trainer) for group in self.clients]
        measuring.append(("server", self.aggregator))
        measuring += [(plugin.label, plugin) for plugin in evaluators]
        columns: list[str] = []
        for who, plugin in measuring:
            columns += [f"{who}/{metric}" for metric in plugin.entry.metrics]
        for group_name in self.group_names:
            columns += [f"group/{group_name}/{what}" for what in GROUPED]
        return tuple(dict.fromkeys(columns))

    def client_groups(self, labels: npt.NDArray[np.int64]) -> dict[int, ClientGroup]:
        """Client id to group, for all clients in a group. Groups by size need the (N,) training labels."""
        sizes: list[int] = []
        if some_choose_by_size(self):
            sizes = [len(part) for part in self.split(labels)]
        return members_of(self, sizes)

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of the groups in results, and that of all other clients; empty without groups."""
        if not self.clients:
            return ()
        return (*(group.name for group in self.clients), OTHERS)

    def trained_by(self, group: ClientGroup | None) -> Experiment:
        """What a client of a group trains by; None: of no group."""
        if group is None:
            return self
        assert isinstance(group.recipe, Experiment)
        return group.recipe

    @property
    def everyone(self) -> tuple[Experiment, ...]:
        """What the clients of no group train by, then what those of each group train by."""
        return (self, *map(self.trained_by, self.clients))

    def train_settings(self, round: int) -> TrainSettings:
        """The local trainer's share of ``train_args`` in a round, counted from 1."""
        train = self.train
        return TrainSettings(
            epochs=train.epochs,
            batch_size=train.batch_size,
            learning_rate=train.learning_rate_of(round),
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            num_rounds=train.comm_round,
            local_steps=train.local_steps,
            client_optimizer=train.client_optimizer,
            nesterov=train.nesterov,
            max_grad_norm=train.max_grad_norm,
            has_schedule=train.has_schedule,
        )

    # --- building: imports torch --------------------------------------------------------------------------------------

    def who(self, pick: Plugin[Any]) -> str:
        """A plugin as messages name it: ``evaluator 'mim' (my-attacks 1.2)``."""
        if ":" in pick.name:  # a model of the user's own
            return f"{pick.entry.kind} {pick.name}"
        return f"{pick.entry.kind} '{pick.name}' ({self.registry.provider(kind_of(pick.entry), pick.entry.name)})"

    def attribute_errors_to(self, pick: Plugin[Any]) -> AbstractContextManager[None]:
        """Let errors about a plugin that are raised inside begin with its name."""
        return attribute_errors_to(self.who(pick), pick.entry.config)

    def built(self, pick: Plugin[Any], expected: Callable[..., T], *arguments: Any, names: str = "options") -> T:
        """A plugin, from its options and further arguments; see ``building.build_plugin``."""
        with self.attribute_errors_to(pick):
            build = pick.entry.load()
            check_class(build, pick.entry)
            plugin = build_plugin(build, expected, pick.options, *arguments, names=names)
            check_class(plugin, pick.entry)
            return plugin

    def build_trainer(self) -> CheckedTrainer:
        """The local trainer, composed with its loss modifier."""
        modifier = self.built(self.modifier, LossModifier)
        modifier = CheckedModifier(modifier, self.modifier.entry, self.who(self.modifier))
        trainer = self.built(self.trainer, LocalTrainer, modifier, names="options, modifier")
        self.check_method(type(trainer))
        return CheckedTrainer(trainer, self.trainer.entry, self.who(self.trainer))

    def check_method(self, method: object) -> None:
        """Refuse an addition or an inner attack to which the method, a class or what builds it, leaves no place."""
        inner, who = self.threat.inner, f"local trainer '{self.trainer.name}'"
        added: dict[str, KeyPath] = {name: (*self.trainer.path, name) for name in self.additions.as_run()}
        if self.threat.by_class is not None and self.trains_attacked:
            added["by_class"] = ("calfat", "threat", "by_class")
        for name, path in added.items():
            why = ""
            if isinstance(method, type) and not issubclass(method, AdversarialTrainer):
                why = f"{who} has a training loop of its own, to which nothing can be added; remove the key."
            elif name == "awp" and isinstance(self.trainer.options, AWPOptions):
                why = f"{who} perturbs weights already, by its options gamma and warmup; remove the key."
            elif name == "awp" and "backward" in inner.entry.replaces:
                why = f"the inner attack '{inner.name}' steps by one gradient; remove the key or choose another attack."
            elif name == "by_class" and not inner.entry.by_class:
                why = (
                    f"the inner attack '{inner.name}' cannot give each example an eps of its own (its entry does not "
                    "say by_class). Remove the key, for a group by its own by_class: null, or choose another attack, "
                    "such as pgd."
                )
            if why:
                raise self.document.error(path, why)
        if inner.name == "pgd":
            return
        steps = self.threat.own_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise PluginError(f"{self.who(inner)}: its steps gave {returned.described(steps)}; expected 1 or more.")
        for name in inner.entry.replaces:
            if not hasattr(AdversarialTrainer, name):
                raise PluginError(f"{self.who(inner)}: its replaces has '{name}', which AdversarialTrainer has not.")
            usual = getattr(AdversarialTrainer, name)
            if getattr(method, name, usual) is usual:
                continue
            why = f"{who} has its own `{name}`, which '{inner.name}' leaves no place for; choose another inner attack."
            if name == "craft":
                why = f"{who} has an attack of its own; remove the key."
            raise self.document.error(inner.path, why)

    def build_inner(self) -> InnerAttack:
        """The attack of training."""
        inner = self.built(self.threat.inner, InnerAttack)
        if type(inner) is InnerAttack:  # PGD, which projects: what lies outside of the ball was made by others
            return inner
        return CheckedInnerAttack(inner, self.threat.inner.entry, self.who(self.threat.inner))

    def build_aggregator(self) -> CheckedAggregator:
        """The aggregator."""
        aggregator = self.built(self.aggregator, Aggregator)
        return CheckedAggregator(aggregator, self.aggregator.entry, self.who(self.aggregator))

    def build_evaluators(self, picks: tuple[Plugin[entries.EvaluatorEntry], ...]) -> list[tuple[str, Evaluator]]:
        """(label, evaluator) for each pick."""
        evaluators: list[tuple[str, Evaluator]] = []
        for pick in picks:
            evaluator = self.built(pick, Evaluator)
            evaluators.append((pick.label, CheckedEvaluator(evaluator, pick.entry, self.who(pick))))
        return evaluators

    def ready_evaluators(
        self, picks: tuple[Plugin[entries.EvaluatorEntry], ...], task: SetUpTask
    ) -> list[tuple[str, Evaluator]]:
        """As :meth:`build_evaluators`, and set up: they can measure."""
        evaluators = self.build_evaluators(picks)
        for pick, (_, evaluator) in zip(picks, evaluators, strict=True):
            with self._complaints_at(pick.path):
                if pick.entry.uses_clients and not task.has_clients:
                    raise OptionError(
                        f"'{pick.entry.name}' measures the clients of a round, which are there only while a federation "
                        "trains: a finished run keeps its global model, and a model alone has none. Name it in a "
                        "recipe, under calfat.evaluators or calfat.monitor.evaluators."
                    )
                evaluator.set_up(task)
        return evaluators

    def splits_of(self, rank: int | None) -> tuple[str, ...]:
        """The splits of the data set that a party reads; with ``partition_method: silo`` it is one."""
        if rank is None or self.partition.entry.name != SILO:
            return BOTH_SPLITS
        if rank == 0:
            return ("test",)
        return ("train",)

    def load_dataset(self, rank: int | None = None) -> Dataset:
        """Read the data set, with as many examples and the validation split as the recipe says.

        With ``partition_method: silo`` and a rank, it is what that party has: a client its training split, the server
        (rank 0) its test split.
        """
        root, options = self.data.data_cache_dir, asdict(self.dataset.options)
        if rank is not None and self.partition.entry.name == SILO:
            root = for_rank(root, rank)
            options["only"] = self.splits_of(rank)[0]
        with self.attribute_errors_to(self.dataset):
            read = build_plugin(self.dataset.entry.load(), Dataset, expanded(root), names="root", **options)
        if read.num_classes < 2:
            raise DataError(
                f"data set {read.name}: there is one class, {read.class_names[0]}, so any answer is right; expected "
                "two or more."
            )
        data = self.data
        return prepared(
            read,
            max_train=data.max_train_examples,
            max_test=data.max_test_examples,
            validation_share=data.validation_share,
            validate_on_test=self.partition.entry.name == SILO,
            seed=self._partition_options().get("seed", self.seed),
        )

    def split(self, labels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Index arrays of the (N,) training labels, one a client, ascending client id."""
        entry, clients, how = self.partition.entry, self.num_clients, self._partition_options()
        if entry.uses_alpha:
            how["alpha"] = self.data.partition_alpha
        with self._complaints_at(("data_args", "partition_method")), self.attribute_errors_to(self.partition):
            shards = build_plugin(entry.load(), object, labels.copy(), clients, names="labels, num_clients", **how)
            return checked_split(shards, len(labels), clients, may_leave_out=entry.may_leave_out)

    def _partition_options(self) -> dict[str, Any]:
        """With the run's seed where the partition is given none of its own."""
        arguments = asdict(self.partition.options)
        if arguments.get("seed", 0) is None:
            arguments["seed"] = self.seed
        return arguments

    def build_model(self, images: ImageShape, trainer: LocalTrainer, *, weights_follow: bool = False) -> nn.Module:
        """The global model with its initial weights, a function of the seed alone unless others follow; on the CPU."""
        from torch import nn

        from calfat_plugin.maths.tied import refuse_overlaps
        from calfat_plugin.models.building import built_model, refuse_other_training_mode, seeded

        def build() -> nn.Module:
            model = built_model(
                self.model.entry.load(),
                self.who(self.model),
                in_channels=images.in_channels,
                image_size=images.image_size,
                num_classes=images.num_classes,
                **asdict(self.model.options),
            )
            if not weights_follow:  # it will be trained
                refuse_other_training_mode(model, self.who(self.model), images)
            with self.attribute_errors_to(self.trainer):
                adapted = returned.instance(trainer.adapt_model(model), nn.Module, "adapt_model returned")
            refuse_overlaps(adapted, f"{self.who(self.trainer)}, adapt_model")
            return adapted

        with self._complaints_at(("model_args", "model")):
            return seeded(build, derive_seed(self.seed, "weights"), weights_follow=weights_follow)

    @contextmanager
    def _complaints_at(self, path: KeyPath) -> Iterator[None]:
        """Let errors begin with the place of the key that picked what raises them."""
        try:
            yield
        except CalfatError as error:
            error.args = (f"{self.document.place(path)}: {dotted(path)}: {error}",)
            raise


# --- who is in a group ------------------------------------------------------------------------------------------------


def some_choose_by_size(experiment: Recipe) -> bool:
    """Whether a group is of the clients with the fewest or the most training examples."""
    return any(group.options.smallest or group.options.largest for group in experiment.clients)


def members_of(experiment: Recipe, sizes: Sequence[int]) -> dict[int, ClientGroup]:
    """Client id to its group, of those in one; the first group that chooses a client has it.

    ``sizes``, the training examples of each client, are needed only for ``smallest`` and ``largest``.
    """
    group_of: dict[int, ClientGroup] = {}
    for index, group in enumerate(experiment.clients):
        free = [client for client in range(experiment.num_clients) if client not in group_of]
        options = group.options
        if group.ids is not None:
            candidates = [client for client in group.ids if client not in group_of]
            count = len(candidates)
        elif options.share is not None:
            candidates = _drawn(experiment, options, index, free)
            count = round(options.share * experiment.num_clients)
            if count == 0:
                text = f"share: {options.share:g} of {experiment.num_clients} clients is none; take a larger one."
                raise experiment.document.error(group.path, text)
        else:
            candidates = sorted(free, key=lambda client: sizes[client], reverse=options.largest is not None)
            count = options.smallest or options.largest or 0
        if not candidates:
            text = "no client is left for this group: those above have them all."
            raise experiment.document.error(group.path, text)
        if count > len(candidates):
            text = f"it asks for {count} clients, and {len(free)} are in no group above."
            raise experiment.document.error(group.path, text)
        for client in candidates[:count]:
            group_of[client] = group
    if len(group_of) == experiment.num_clients and all(group.attacker for group in group_of.values()):
        raise experiment.document.error(CLIENTS, "every client is an attacker; expected at least one that is not.")
    return dict(sorted(group_of.items()))


def _drawn(experiment: Recipe, options: GroupOptions, index: int, free: Sequence[int]) -> list[int]:
    """The free clients in the order in which a share of them is drawn; ``index``: the place of the group."""
    import numpy as np

    seed = options.seed
    if seed is None:
        seed = experiment.seed
    draw = np.random.default_rng(derive_seed(seed, "clients of a group", extra=index))
    return [int(client) for client in draw.permutation(free)]


def attackers_among(groups: Mapping[int, ClientGroup]) -> list[int]:
    """Ids of the clients that attack, of those in a group."""
    return [client for client, group in groups.items() if group.attacker is not None]
