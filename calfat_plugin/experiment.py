"""Recipe and registry become an experiment: names resolved, options typed, defaults and presets filled in.

``calfat check`` stops here: no data is read and no device touched, and nearly every typo is caught.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from calfat_plugin import entries
from calfat_plugin.errors import OptionError, PluginError, did_you_mean, listed
from calfat_plugin.options import describe_options, options_to_plain, parse_options, to_plain
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.parse import failing_at, parse_recipe
from calfat_plugin.recipe.schema import HOST_SECTIONS, Choice, Recipe
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from calfat_plugin.datasets import Dataset
    from calfat_plugin.interfaces import Aggregator, Evaluator, LocalTrainer, TrainSettings

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
    def train_settings(self) -> TrainSettings:
        """The local trainer's share of ``train_args``."""
        from calfat_plugin.interfaces import TrainSettings

        train = self.recipe.train
        return TrainSettings(
            epochs=train.epochs,
            batch_size=train.batch_size,
            learning_rate=train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            num_rounds=train.comm_round,
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
        owed = {pick.entry.citation: None for pick in picks if pick.entry.citation is not None}
        return tuple(owed)

    # --- building: imports torch --------------------------------------------------------------------------------------

    def build_trainer(self) -> LocalTrainer:
        """The local trainer, composed with its loss modifier."""
        modifier = self.modifier.entry.load()(self.modifier.options)
        trainer: LocalTrainer = self.trainer.entry.load()(self.trainer.options, modifier)
        return trainer

    def build_aggregator(self) -> Aggregator:
        """The aggregator."""
        aggregator: Aggregator = self.aggregator.entry.load()(self.aggregator.options)
        return aggregator

    def build_evaluators(self, picks: tuple[Pick[entries.EvaluatorEntry], ...]) -> list[tuple[str, Evaluator]]:
        """(label, evaluator) for each pick."""
        return [(pick.label, pick.entry.load()(pick.options)) for pick in picks]

    def load_dataset(self) -> Dataset:
        """Read the data set.

        Raises:
            DataError: it is missing or damaged.
        """
        root = Path(self.recipe.data.data_cache_dir).expanduser()
        dataset: Dataset = self.dataset.entry.load()(root, **asdict(self.dataset.options))
        return dataset

    def load_own_dataset(self, rank: int) -> Dataset:
        """Read what one party of a cross-silo run has: a client its training split, the server (rank 0) its test split.

        Only where ``partition_method: silo`` says so; else every party reads the whole data set.

        Raises:
            DataError: it is missing or damaged.
        """
        if self.partition.entry.name != SILO:
            return self.load_dataset()
        root = Path(self.recipe.data.data_cache_dir.replace("{rank}", str(rank))).expanduser()
        dataset: Dataset = self.dataset.entry.load()(
            root, **asdict(self.dataset.options), only="train" if rank else "test"
        )
        return dataset

    def split(self, labels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Index arrays, one a client, ascending client id.

        Args:
            labels: (N,) training labels.

        Raises:
            DataError: the labels cannot be split as asked.
        """
        arguments = asdict(self.partition.options)
        if arguments.get("seed", 0) is None:
            arguments["seed"] = self.seed
        if self.partition.entry.uses_alpha:
            arguments["alpha"] = self.recipe.data.partition_alpha
        shards: list[npt.NDArray[np.int64]] = self.partition.entry.load()(labels, self.num_clients, **arguments)
        return shards

    def build_model(self, dataset: Dataset, trainer: LocalTrainer) -> nn.Module:
        """The global model with its initial weights, a function of the seed alone; on the CPU.

        Raises:
            ModelError: the model cannot take this data set's images.
        """
        from calfat_plugin.models.building import seeded
        from calfat_plugin.seeds import derive_seed

        def build() -> nn.Module:
            model: nn.Module = self.model.entry.load()(
                in_channels=dataset.in_channels,
                image_size=dataset.image_size,
                num_classes=dataset.num_classes,
                **asdict(self.model.options),
            )
            return trainer.adapt_model(model)

        return seeded(build, derive_seed(self.seed, "weights"))

    # --- writing ------------------------------------------------------------------------------------------------------

    def as_run(self) -> dict[str, Any]:
        """The recipe in full: every default, preset and derived value written out. Parsing it gives this experiment."""
        recipe = self.recipe
        typed = (recipe.common, recipe.data, recipe.model, recipe.train, recipe.device, recipe.comm, recipe.tracking)
        sections: dict[str, Any] = {
            name: {**options_to_plain(values), **recipe.host_extra.get(name, {})}
            for name, values in zip(HOST_SECTIONS, typed, strict=True)
        }
        sections["train_args"]["client_num_per_round"] = recipe.clients_per_round
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
        if recipe.common.training_type == "cross_silo" or recipe.document.has(("calfat", "silo")):
            sections["calfat"]["silo"] = recipe.silo.as_run()
        return sections

    def _trainer_as_run(self) -> dict[str, Any]:
        written = self.trainer.as_run()
        if self.trainer.entry.modifiers:
            written["loss"] = self.modifier.as_run()
        return written


def assemble(document: Document, registry: Registry) -> Experiment:
    """Resolve a recipe.

    Raises:
        RecipeError, PluginError: with place, key path, what was found, what was wanted and the nearest right spelling.
    """
    recipe = parse_recipe(_with_preset(document, registry))
    trainer = _pick(recipe, registry, entries.TrainerEntry, recipe.trainer, also=("name", "preset", "loss"))
    aggregator = _pick(recipe, registry, entries.AggregatorEntry, recipe.aggregator)
    _refuse_conflict(recipe, trainer.entry, aggregator.entry)
    return Experiment(
        recipe=recipe,
        registry=registry,
        trainer=trainer,
        modifier=_pick_modifier(recipe, registry, trainer),
        aggregator=aggregator,
        dataset=_pick(recipe, registry, entries.DatasetEntry, recipe.dataset, name_at=("data_args", "dataset")),
        model=_pick_model(recipe, registry),
        partition=_pick(
            recipe, registry, entries.PartitionEntry, recipe.partition, name_at=("data_args", "partition_method")
        ),
        evaluators=_pick_evaluators(recipe, registry, recipe.evaluators),
        monitor_evaluators=_pick_evaluators(recipe, registry, recipe.monitor_evaluators),
        loggers=tuple(_pick(recipe, registry, entries.LoggerEntry, choice) for choice in recipe.loggers),
    )


def _pick_evaluators(
    recipe: Recipe, registry: Registry, choices: tuple[Choice, ...]
) -> tuple[Pick[entries.EvaluatorEntry], ...]:
    return tuple(_pick(recipe, registry, entries.EvaluatorEntry, choice) for choice in choices)


def _pick(
    recipe: Recipe,
    registry: Registry,
    kind: type[E],
    choice: Choice,
    *,
    name_at: KeyPath | None = None,
    also: tuple[str, ...] = ("name", "preset", "label"),
) -> Pick[E]:
    """Look a choice up and type its options. ``name_at``: where its name stands, if not at the choice itself."""
    document = recipe.document
    entry, named = _find(document, registry, kind, choice, name_at)
    known = {info.name for info in describe_options(entry.config)}
    clash = [name for name in named if choice.options.get(name, named[name]) != named[name]]
    if clash:
        raise document.error(
            (*choice.path, clash[0]),
            f"'{choice.name}' already says {clash[0]} = {named[clash[0]]}; keep one of the two.",
        )
    preset: Mapping[str, Any] = {}
    if choice.preset is not None:
        if choice.preset not in entry.presets:
            known_presets = f" Known: {listed(entry.presets)}." if entry.presets else " It has none."
            hint = did_you_mean(choice.preset, entry.presets) or known_presets
            raise document.error(
                (*choice.path, "preset"), f"{kind.kind} '{entry.name}' has no preset '{choice.preset}'.{hint}"
            )
        preset = entry.presets[choice.preset].options
    options: Any = parse_options(
        entry.config,
        {**preset, **named, **choice.options},
        owner=f"{kind.kind} '{entry.name}'",
        fail=failing_at(document, choice.path),
        also=tuple(key for key in also if name_at is None and key not in known),
    )
    try:
        entry.check(options, recipe)
    except OptionError as error:
        raise document.error(choice.path, str(error)) from None
    return Pick(entry, options, choice.name, choice.label or choice.name)


def _refuse_conflict(recipe: Recipe, trainer: entries.TrainerEntry, aggregator: entries.AggregatorEntry) -> None:
    reason = trainer.conflicts.get(aggregator.name) or aggregator.conflicts.get(trainer.name)
    if reason is not None:
        raise recipe.document.error(
            recipe.aggregator.path,
            f"aggregator '{aggregator.name}' and local trainer '{trainer.name}' cannot work together: {reason}",
        )


def _find(
    document: Document, registry: Registry, kind: type[E], choice: Choice, name_at: KeyPath | None
) -> tuple[E, Mapping[str, int]]:
    try:
        return registry.find(kind, choice.name)
    except PluginError as error:
        where = name_at or choice.path
        if name_at is None and document.has((*choice.path, "name")):
            where = (*choice.path, "name")
        raise document.error(where, str(error)) from None


def _pick_model(recipe: Recipe, registry: Registry) -> Pick[entries.ModelEntry]:
    """A model by name, or a user's own ``package.module:factory``, which takes no options from the recipe."""
    choice = recipe.model_choice
    if ":" not in choice.name:
        return _pick(recipe, registry, entries.ModelEntry, choice, name_at=("model_args", "model"))
    path = choice.name

    def build(**arguments: Any) -> nn.Module:
        from calfat_plugin.models import model_from_factory

        return model_from_factory(path, **arguments)

    entry = entries.ModelEntry("own", build=build, summary=f"built by {path}")
    options: Any = parse_options(
        entry.config,
        choice.options,
        owner=f"model '{path}'",
        fail=failing_at(recipe.document, choice.path),
    )
    return Pick(entry, options, path, path)


def _pick_modifier(
    recipe: Recipe, registry: Registry, trainer: Pick[entries.TrainerEntry]
) -> Pick[entries.ModifierEntry]:
    choice, entry = recipe.trainer.loss, trainer.entry
    path: KeyPath = (*recipe.trainer.path, "loss")
    if choice is None:
        default = Choice("plain", {}, path, label="plain")
        return _pick(recipe, registry, entries.ModifierEntry, default)
    pick = _pick(recipe, registry, entries.ModifierEntry, choice)
    defined_for = defined_modifiers(registry, entry)
    if pick.entry.name not in defined_for:
        defined = (
            f"It composes with: {listed(defined_for)}." if defined_for else "It brings its own loss; leave the key out."
        )
        raise recipe.document.error(
            path, f"local trainer '{entry.name}' does not compose with the loss modifier '{pick.entry.name}'. {defined}"
        )
    return pick


def defined_modifiers(registry: Registry, trainer: entries.TrainerEntry) -> tuple[str, ...]:
    """Names of the loss modifiers that a method composes with, whichever side says so; none where it brings its own."""
    if not trainer.modifiers:
        return ()
    offered = (modifier for modifier, _ in registry.offers(entries.ModifierEntry))
    also = (m.name for m in offered if trainer.name in m.methods and m.name not in trainer.modifiers)
    return (*trainer.modifiers, *also)


def _with_preset(document: Document, registry: Registry) -> Document:
    """Fill keys that the recipe leaves out with the defaults of the trainer's preset.

    Anything wrong with the names involved is left for :func:`_pick` to complain about.
    """
    trainer = document.get(("calfat", "trainer"))
    name, preset_name = (
        (trainer.get("name", "calfat"), trainer.get("preset")) if isinstance(trainer, Mapping) else (None, None)
    )
    if not isinstance(name, str) or not isinstance(preset_name, str):
        return document
    try:
        entry, _ = registry.find(entries.TrainerEntry, name)
    except PluginError:
        return document
    if preset_name not in entry.presets:
        return document
    dataset = document.get(("data_args", "dataset"))
    defaults = entry.presets[preset_name].recipe(dataset if isinstance(dataset, str) else "digits")
    for key, value in defaults.items():
        path = tuple(key.split("."))
        parent = document.get(path[:-1])
        if not document.has(path) and (parent is None or isinstance(parent, Mapping)):
            document = document.with_value(path, value, f"preset '{preset_name}' of '{name}'")
    return document


def same_but_rounds(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two recipes, as run, differ.

    The number of rounds may differ, since a resumed run can go further; loggers, reported numbers, addresses and the
    patience of parties change no result.
    """
    flat_first, flat_second = _flat(first), _flat(second)
    ignored = ("train_args.comm_round", "calfat.loggers", "calfat.reported.", "calfat.silo.")
    keys = sorted(key for key in set(flat_first) | set(flat_second) if not key.startswith(ignored))
    missing = object()
    return [key for key in keys if flat_first.get(key, missing) != flat_second.get(key, missing)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
