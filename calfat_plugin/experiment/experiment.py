"""The experiment: everything that a run needs to know, and how its parts are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from calfat_plugin import entries, returned
from calfat_plugin.errors import CalfatError
from calfat_plugin.options import options_to_plain, to_plain
from calfat_plugin.recipe.document import KeyPath, dotted
from calfat_plugin.recipe.schema import HOST_SECTIONS, TRAINING_TYPES, Recipe
from calfat_plugin.recipe.silo import SILO, for_rank
from calfat_plugin.recipe.training import TrainArgs, useless
from calfat_plugin.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from calfat_plugin.datasets import Dataset
    from calfat_plugin.experiment.building import CheckedEvaluator
    from calfat_plugin.interfaces import Aggregator, LocalTrainer, TrainSettings

E = TypeVar("E", bound=entries.Entry)


@dataclass(frozen=True)
class Pick(Generic[E]):
    """A plugin picked by a recipe: its entry and its typed options.

    Attributes:
        name: as the recipe spells it.
        label: what its results are called.
    """

    entry: E
    options: Any
    name: str
    label: str

    def as_run(self) -> dict[str, Any]:
        """The pick as a recipe writes it in full."""
        plain = {"name": self.name, **options_to_plain(self.options)}
        return plain if self.label == self.name else {**plain, "label": self.label}


@dataclass(frozen=True)
class Experiment:
    """Everything a run needs to know, nothing of it loaded yet."""

    recipe: Recipe
    registry: Registry
    trainer: Pick[entries.TrainerEntry]
    modifier: Pick[entries.ModifierEntry]
    aggregator: Pick[entries.AggregatorEntry]
    dataset: Pick[entries.DatasetEntry]
    model: Pick[entries.ModelEntry]
    partition: Pick[entries.PartitionEntry]
    evaluators: tuple[Pick[entries.EvaluatorEntry], ...]
    monitor_evaluators: tuple[Pick[entries.EvaluatorEntry], ...]
    loggers: tuple[Pick[entries.LoggerEntry], ...] = ()

    @property
    def seed(self) -> int:
        """The run's seed, from which every random stream is derived."""
        return self.recipe.common.random_seed

    @property
    def num_clients(self) -> int:
        """Clients in total."""
        return self.recipe.train.client_num_in_total

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.recipe.train.comm_round

    @property
    def training_step_problem(self) -> str:
        """Why the attack of training searches its ball badly; empty where it need not, and without an attack."""
        return self.recipe.threat.step_problem() if getattr(self.trainer.entry.build, "attacks", True) else ""

    @property
    def metric_columns(self) -> tuple[str, ...]:
        """The columns of ``rounds.csv`` for what plugins measure beside: ``train/margin``, ``pgd20/ece``."""
        return self._metrics(self.monitor_evaluators)

    @property
    def final_metrics(self) -> tuple[str, ...]:
        """What a finished run knows beside accuracies: the last round's numbers, and the final evaluators'."""
        return self._metrics(self.evaluators)

    def _metrics(self, evaluators: tuple[Pick[entries.EvaluatorEntry], ...]) -> tuple[str, ...]:
        measuring: dict[str, Pick[Any]] = {"train": self.trainer, "server": self.aggregator}
        measuring |= {pick.label: pick for pick in evaluators}
        return tuple(f"{who}/{name}" for who, pick in measuring.items() for name in pick.entry.metrics)

    @property
    def host_sections(self) -> dict[str, Any]:
        """The host's sections of the recipe, typed, by name."""
        return {name: getattr(self.recipe, name.removesuffix("_args")) for name in HOST_SECTIONS}

    def train_settings(self, round: int) -> TrainSettings:
        """The local trainer's share of ``train_args`` in a round, counted from 1."""
        from calfat_plugin.interfaces import TrainSettings

        train = self.recipe.train
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

    def citations(self) -> tuple[entries.Citation, ...]:
        """What this run owes a citation, without repetition."""
        picks: tuple[Pick[Any], ...] = (
            self.trainer,
            self.modifier,
            self.aggregator,
            self.dataset,
            self.model,
            self.partition,
            *self.evaluators,
            *self.monitor_evaluators,
        )
        return tuple({pick.entry.citation: None for pick in picks if pick.entry.citation is not None})

    # --- building: imports torch --------------------------------------------------------------------------------------

    def who(self, pick: Pick[Any]) -> str:
        """A plugin as messages name it: ``evaluator 'mim' (my-attacks 1.2)``."""
        return f"{pick.entry.kind} '{pick.name}' ({self.registry.provider(type(pick.entry), pick.entry.name)})"

    def naming(self, pick: Pick[Any]) -> AbstractContextManager[None]:
        """Let errors about a plugin that are raised inside begin with its name."""
        return returned.naming(self.who(pick), pick.entry.config)

    def build_trainer(self) -> LocalTrainer:
        """The local trainer, composed with its loss modifier.

        Raises:
            PluginError: one of the two cannot be built.
        """
        from calfat_plugin.experiment.building import CheckedModifier, built
        from calfat_plugin.interfaces import LocalTrainer, LossModifier

        pick = self.modifier
        with self.naming(pick):
            modifier = CheckedModifier(built(pick.entry.load(), LossModifier, pick.options), pick.entry, self.who(pick))
        with self.naming(self.trainer):
            options = self.trainer.options
            return built(self.trainer.entry.load(), LocalTrainer, options, modifier, names="options, modifier")

    def build_aggregator(self) -> Aggregator:
        """The aggregator.

        Raises:
            PluginError: it cannot be built.
        """
        from calfat_plugin.experiment.building import built
        from calfat_plugin.interfaces import Aggregator

        with self.naming(self.aggregator):
            return built(self.aggregator.entry.load(), Aggregator, self.aggregator.options)

    def build_evaluators(self, picks: tuple[Pick[entries.EvaluatorEntry], ...]) -> list[tuple[str, CheckedEvaluator]]:
        """(label, evaluator) for each pick.

        Raises:
            PluginError: one cannot be built.
        """
        from calfat_plugin.experiment.building import CheckedEvaluator, built
        from calfat_plugin.interfaces import Evaluator

        made = []
        for pick in picks:
            with self.naming(pick):
                evaluator = built(pick.entry.load(), Evaluator, pick.options)
            made.append((pick.label, CheckedEvaluator(evaluator, pick.entry, self.who(pick))))
        return made

    def load_dataset(self, rank: int | None = None) -> Dataset:
        """Read the data set, with as many examples and the validation split as the recipe says.

        Args:
            rank: of a party of a cross-silo run with ``partition_method: silo``, to read what that party has: a client
                its training split, the server (rank 0) its test split. Otherwise, or None: everything.

        Raises:
            DataError: it is missing or damaged.
            PluginError: what the plugin gives is no data set.
        """
        from calfat_plugin.datasets import Dataset
        from calfat_plugin.experiment.building import built

        root, options = self.recipe.data.data_cache_dir, asdict(self.dataset.options)
        if rank is not None and self.partition.entry.name == SILO:
            root, options["only"] = for_rank(root, rank), "train" if rank else "test"
        with self.naming(self.dataset):
            read = built(self.dataset.entry.load(), Dataset, Path(root).expanduser(), names="root", **options)

        from calfat_plugin.datasets.subset import prepared

        data = self.recipe.data
        return prepared(
            read,
            max_train=data.max_train_examples,
            max_test=data.max_test_examples,
            validation_share=data.validation_share,
            validate_on_test=self.partition.entry.name == SILO,
            seed=self._partition_options().get("seed", self.seed),
        )

    def split(self, labels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Index arrays, one a client, ascending client id.

        Args:
            labels: (N,) training labels.

        Raises:
            DataError: the labels cannot be split as asked.
            PluginError: what the plugin gives is no partition.
        """
        from calfat_plugin.experiment.building import built, checked_split

        entry, clients = self.partition.entry, self.num_clients
        arguments = self._partition_options()
        if entry.uses_alpha:
            arguments["alpha"] = self.recipe.data.partition_alpha
        with self._complaints_at(("data_args", "partition_method")), self.naming(self.partition):
            shards = built(entry.load(), object, labels, clients, names="labels, num_clients", **arguments)
            return checked_split(shards, len(labels), clients, may_leave_out=entry.may_leave_out)

    def _partition_options(self) -> dict[str, Any]:
        """With the run's seed where the partition is given none of its own."""
        arguments = asdict(self.partition.options)
        if arguments.get("seed", 0) is None:
            arguments["seed"] = self.seed
        return arguments

    def build_model(self, dataset: Dataset, trainer: LocalTrainer) -> nn.Module:
        """The global model with its initial weights, a function of the seed alone; on the CPU.

        Raises:
            ModelError: the model cannot take this data set's images, or is none.
            PluginError: the trainer makes something else of it.
        """
        from torch import nn

        from calfat_plugin.models.building import built_model, seeded
        from calfat_plugin.seeds import derive_seed

        def build() -> nn.Module:
            model = built_model(
                self.model.entry.load(),
                f"model {self.model.name}" if ":" in self.model.name else self.who(self.model),
                in_channels=dataset.in_channels,
                image_size=dataset.image_size,
                num_classes=dataset.num_classes,
                **asdict(self.model.options),
            )
            with self.naming(self.trainer):
                return returned.instance(trainer.adapt_model(model), nn.Module, "adapt_model returned")

        with self._complaints_at(("model_args", "model")):
            return seeded(build, derive_seed(self.seed, "weights"))

    @contextmanager
    def _complaints_at(self, path: KeyPath) -> Iterator[None]:
        """Let errors begin with the place of the key that picked what raises them."""
        try:
            yield
        except CalfatError as error:
            error.args = (f"{self.recipe.document.place(path)}: {dotted(path)}: {error}",)
            raise

    # --- writing ------------------------------------------------------------------------------------------------------

    def as_run(self) -> dict[str, Any]:
        """The recipe in full: every default, preset and derived value written out. Parsing it gives this experiment."""
        recipe = self.recipe
        sections: dict[str, Any] = {
            name: {**options_to_plain(values), **recipe.host_extra.get(name, {})}
            for name, values in self.host_sections.items()
        }
        sections["train_args"]["client_num_per_round"] = recipe.clients_per_round
        # What has no effect is not written: read again, the file would draw a warning.
        del sections["train_args"]["federated_optimizer"]
        sections["train_args"] |= {key: getattr(TrainArgs, key) for key, _ in useless(recipe.train)}
        if not self.partition.entry.uses_alpha:
            del sections["data_args"]["partition_alpha"]
        for name, extra in recipe.host_extra.items():
            sections.setdefault(name, dict(extra))
        sections["calfat"] = {
            "trainer": self._trainer_as_run(),
            "aggregator": self.aggregator.as_run(),
            "threat": {
                "norm": recipe.threat.norm,
                "eps": to_plain(recipe.threat.eps),
                "step_size": to_plain(recipe.threat.step_size),
                "steps": recipe.threat.steps,
            },
            "evaluators": [pick.as_run() for pick in self.evaluators],
            "monitor": {
                **options_to_plain(recipe.monitor),
                "evaluators": [pick.as_run() for pick in self.monitor_evaluators],
            },
            "partition": options_to_plain(self.partition.options),
            "dataset": options_to_plain(self.dataset.options),
            "model": options_to_plain(self.model.options),
            "evaluation": options_to_plain(recipe.evaluation),
            "runtime": options_to_plain(recipe.runtime),
            "loggers": [pick.as_run() for pick in self.loggers],
            "reported": {"source": recipe.reported.source, **recipe.reported.percent},
        }
        if recipe.plugins:
            sections["calfat"]["plugins"] = {name: file.as_run() for name, file in recipe.plugins.items()}
        if TRAINING_TYPES[recipe.common.training_type] or recipe.document.has(("calfat", "silo")):
            sections["calfat"]["silo"] = recipe.silo.as_run()
        return sections

    def _trainer_as_run(self) -> dict[str, Any]:
        written = self.trainer.as_run()
        if self.trainer.entry.modifiers:
            written["loss"] = self.modifier.as_run()
        return written
