"""Entries: the small typed objects with which a plugin says "I offer this name of this kind".

An entry holds data only (name, options, citation) and a way to build the thing. Importing the module that makes
entries must stay cheap: where the implementation imports torch, give ``build`` as ``"package.module:Name"``; it is
imported when a run needs it.
"""

from __future__ import annotations

import functools
import importlib
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from calfat_plugin.errors import PluginError, listed, one_line
from calfat_plugin.options import NoOptions, describe_options
from calfat_plugin.results import ALIGNMENT, PASSES

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_METRIC = re.compile(r"[a-z][a-z0-9_]*")
_BUILD = re.compile(r"\w+(\.\w+)*:\w+")


class _Typed:
    """A dataclass whose fields are checked against their annotations: a mistake shows while its plugin is loaded."""

    def __post_init__(self) -> None:
        who = type(self).__name__
        if isinstance(self, Entry):
            who = f"{self.kind} '{self.name}'"
        hints = _hints(type(self))  # type: ignore[arg-type]  # mypy: no class has a hash
        for info in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, info.name)
            if not _fits(value, hints[info.name]):
                raise PluginError(f"{who}: its {info.name} is {reprlib.repr(value)}; expected {info.type}.")


@functools.cache
def _hints(of: type) -> dict[str, Any]:
    """The annotations of a class as types; cached, since a registry makes a hundred entries."""
    return typing.get_type_hints(of)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says, looking into mappings and tuples."""
    origin = typing.get_origin(hint)  # the class of ``Mapping[str, int]`` is Mapping
    parts = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return False
        key_hint, item_hint = parts
        return all(_fits(key, key_hint) and _fits(item, item_hint) for key, item in value.items())
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[1:] == (...,):  # tuple[str, ...]: any number of the first
            parts = parts[:1] * len(value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if hint is Any:
        return True
    if hint is int and isinstance(value, bool):
        return False
    return isinstance(value, origin or hint)


@dataclass(frozen=True)
class Citation(_Typed):
    """A paper that a run owes a citation.

    Attributes:
        text: short text for tables.
        bibtex: for the reference list.

    Raises:
        PluginError: a field is not of its type.
    """

    text: str
    bibtex: str = ""


@functools.cache
def _papers() -> dict[str, Citation]:
    """The papers of the built-in plugins, by key; in ``papers.bib`` the short text is the comment above an entry."""
    papers = {}
    content = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    for block in content.strip().split("\n\n"):
        comment, bibtex = block.split("\n", 1)
        key = re.split("[{,]", bibtex)[1]  # @article{key, ...
        papers[key] = Citation(comment.removeprefix("% "), bibtex)
    return papers


def paper(key: str) -> Citation:
    """A paper of a built-in plugin, by its key in ``papers.bib``."""
    return _papers()[key]


@dataclass(frozen=True)
class Preset(_Typed):
    """A named set of defaults.

    Attributes:
        help: one line for the user.
        options: values for the options of the entry itself.
        recipe: data set name to defaults for the rest of the recipe, as dotted key to value, such as
            ``{"train_args.weight_decay": 2e-3}``. They fill keys that the recipe leaves out.

    Raises:
        PluginError: a field is not of its type.
    """

    help: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Callable[[str], Mapping[str, Any]] = lambda dataset: {}


@dataclass(frozen=True)
class Entry(_Typed):
    """What every kind of entry has.

    Attributes:
        kind: what messages and lists call this kind.
        hook: the hook that offers this kind.
        reserved: keys beside a plugin's options in a recipe, which no option may be named after.
        reserved_metrics: names of what is measured anyway, which no metric may have.
        name: lower-case name used in recipes. A recipe may append a number where ``number_option`` says which option
            it sets: ``pgd20`` is ``pgd`` with ``steps: 20``.
        build: the class or factory, or ``"package.module:Name"`` to import it on use.
        config: frozen dataclass of the options.
        summary: one line: what it is.
        formula: the defining formula in plain text, where there is one.
        citation: where it comes from.
        presets: named defaults.
        number_option: the option that a number at the end of the name sets.
        check: called with (options, ``Recipe``) when a recipe that picks this plugin is checked; raises ``OptionError``
            for options that do not fit the rest of the recipe (more favoured clients than clients, say).
        warn: called as ``check`` is, also for each group of clients that train by it: a warning of what is allowed and
            was probably not meant, or an empty text.
        idle: options to those that others of them make useless, each with the reason: a recipe that has another value
            than the default there is warned.
        metrics: what a trainer, aggregator or evaluator measures beside loss and accuracy: name to what it is, such as
            ``{"margin": "mean margin of the true class"}``. Columns of ``rounds.csv`` are named after them.

    Raises:
        PluginError: for a field that is not of its type, a name that recipes could not write, or options that recipes
            could not express.
    """

    kind: ClassVar[str] = "entry"
    hook: ClassVar[str]
    reserved: ClassVar[tuple[str, ...]] = ("name", "preset", "label")
    reserved_metrics: ClassVar[tuple[str, ...]] = ()

    name: str
    build: str | Callable[..., Any]
    config: type = NoOptions
    summary: str = ""
    formula: str = ""
    citation: Citation | None = None
    presets: Mapping[str, Preset] = field(default_factory=dict)
    number_option: str | None = None
    check: Callable[[Any, Any], None] = lambda options, recipe: None
    warn: Callable[[Any, Any], str] = lambda options, recipe: ""
    idle: Callable[[Any], Mapping[str, str]] = lambda options: {}
    metrics: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(
                f"{self.kind} name {self.name!r} must begin with a letter and contain only lower-case letters, digits, "
                "'-', '_'."
            )
        super().__post_init__()
        self._check_metrics()
        self._check_options()

    def _check_metrics(self) -> None:
        taken = ""
        if self.reserved_metrics:
            taken = f" (taken: {listed(self.reserved_metrics)})"
        for metric in self.metrics:
            if not _METRIC.fullmatch(metric) or metric in self.reserved_metrics:
                raise PluginError(
                    f"{self.kind} '{self.name}' has a metric {metric!r}; a metric's name must begin with a letter and "
                    f"contain only lower-case letters, digits, '_'{taken}."
                )

    def _check_options(self) -> None:
        """The options are a dataclass that recipes can express, and what the entry says of options is about these."""
        who = f"{self.kind} '{self.name}'"
        try:
            options = {info.name for info in describe_options(self.config)}
        except TypeError as error:
            raise PluginError(f"{who}: {error}.") from None
        reserved = options.intersection(self.reserved)
        if reserved:
            raise PluginError(f"{who} has an option '{min(reserved)}'; recipes use that key for something else.")
        mentioned: set[str] = set()
        for preset in self.presets.values():
            mentioned.update(preset.options)
        if self.number_option is not None:
            mentioned.add(self.number_option)
        unknown = mentioned - options
        if unknown:
            raise PluginError(f"{who} refers to the option '{min(unknown)}', which it does not have.")

    @property
    def shown_name(self) -> str:
        """The name as lists show it: ``pgd<steps>`` where a number may follow."""
        if self.number_option is None:
            return self.name
        return f"{self.name}<{self.number_option}>"

    def load(self) -> Callable[..., Any]:
        """Return the class or factory, importing it where ``build`` is a text.

        Raises:
            PluginError: when the text does not name something that can be imported and called.
        """
        if callable(self.build):
            return self.build
        who = f"{self.kind} '{self.name}' cannot be built"
        if not _BUILD.fullmatch(self.build):
            raise PluginError(f"{who}: its build is {self.build!r}; expected package.module:Name.")
        module_name, _, attribute = self.build.partition(":")
        try:
            build: object = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise PluginError(f"{who}: {self.build!r} does not import ({error}).") from error
        if not callable(build):
            raise PluginError(f"{who}: {self.build!r} is {one_line(build)}; expected a class or a function.")
        return build


@dataclass(frozen=True)
class TrainerEntry(Entry):
    """A local trainer. ``build(options, modifier)`` returns an ``interfaces.LocalTrainer``.

    Attributes:
        modifiers: names of the loss modifiers that this method composes with; empty when it brings its own loss.
        reshapes: whether ``adapt_model`` changes the model's tensors, so that all clients have to train with it.
        conflicts: aggregator name to the reason why it cannot work with this method; either side may declare it.
    """

    kind: ClassVar[str] = "local trainer"
    hook: ClassVar[str] = "calfat_local_trainers"
    reserved: ClassVar[tuple[str, ...]] = (*Entry.reserved, "loss", "label_smoothing", "awp", "clean_rounds")
    reserved_metrics: ClassVar[tuple[str, ...]] = ("loss", ALIGNMENT, PASSES)
    modifiers: tuple[str, ...] = ("plain",)
    reshapes: bool = False
    conflicts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModifierEntry(Entry):
    """A loss modifier. ``build(options)`` returns an ``interfaces.LossModifier``.

    Attributes:
        methods: local trainers that it composes with, beside those whose ``modifiers`` name it. A method without
            modifiers brings its own loss and composes with none.
        reshapes: as of a trainer.
    """

    kind: ClassVar[str] = "loss modifier"
    hook: ClassVar[str] = "calfat_loss_modifiers"
    methods: tuple[str, ...] = ()
    reshapes: bool = False


@dataclass(frozen=True)
class InnerAttackEntry(Entry):
    """An attack of training. ``build(options)`` returns an ``interfaces.InnerAttack``.

    Attributes:
        steps: options to the steps that it takes, each with one call of the method's loss; None: as many as
            ``calfat.threat.steps``.
        replays: options to the optimiser's steps for a mini-batch.
        replaces: attributes of ``AdversarialTrainer`` for which it leaves no place: a method that has its own is
            refused.
        by_class: whether each example may have an eps of its own (``calfat.threat.by_class``): it starts, steps and
            projects by the budget's own methods, and gives them lengths in terms of eps.
    """

    kind: ClassVar[str] = "inner attack"
    hook: ClassVar[str] = "calfat_inner_attacks"
    steps: Callable[[Any], int | None] = lambda options: None
    replays: Callable[[Any], int] = lambda options: 1
    replaces: tuple[str, ...] = ("craft",)
    by_class: bool = False


@dataclass(frozen=True)
class AggregatorEntry(Entry):
    """An aggregator. ``build(options)`` returns an ``interfaces.Aggregator``.

    Attributes:
        conflicts: local trainer name to the reason why it cannot work with this aggregator.
        beside_others: of ``conflicts``, those that groups of clients may have while other clients have another.
        uses_monitored_data: whether ``combine`` looks at the server's images (``task.monitored``). Results say so
            where these are test images.
    """

    kind: ClassVar[str] = "aggregator"
    hook: ClassVar[str] = "calfat_aggregators"
    conflicts: Mapping[str, str] = field(default_factory=dict)
    beside_others: tuple[str, ...] = ()
    uses_monitored_data: bool = False


@dataclass(frozen=True)
class EvaluatorEntry(Entry):
    """An evaluator. ``build(options)`` returns an ``interfaces.Evaluator``.

    Attributes:
        uses_clients: whether ``evaluate`` looks at the clients of the round (``task.clients``), so that it measures
            only while a federation trains and at its end.
    """

    kind: ClassVar[str] = "evaluator"
    hook: ClassVar[str] = "calfat_evaluators"
    uses_clients: bool = False


@dataclass(frozen=True)
class DatasetEntry(Entry):
    """A data set. ``build(root, **options)`` returns a ``datasets.Dataset``.

    Attributes:
        num_classes: known before anything is read, or None when the files decide.
        image_shape: (channels, height, width), or None when the files decide.
        per_party: whether each party of a cross-silo run can read its own part: ``build`` then also takes
            ``only="train"`` (a client's) or ``only="test"`` (the server's), reads that split alone, and returns it in
            the place of the other one too, which then nobody uses.
        licence: of the data, as who publishes them states it; empty: not known.
    """

    kind: ClassVar[str] = "data set"
    hook: ClassVar[str] = "calfat_datasets"
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    per_party: bool = False
    licence: str = ""


@dataclass(frozen=True)
class ModelEntry(Entry):
    """A model. ``build(in_channels=, image_size=, num_classes=, **options)`` returns a ``torch.nn.Module``.

    Attributes:
        min_size: options to the side of the smallest image that it takes, in pixels; a recipe is refused where the data
            set's images are known to be smaller.
    """

    kind: ClassVar[str] = "model"
    hook: ClassVar[str] = "calfat_models"
    min_size: Callable[[Any], int] = lambda options: 1


@dataclass(frozen=True)
class PartitionEntry(Entry):
    """A partition. ``build(labels, num_clients, **options)`` returns one index array a client.

    An option ``seed`` that the recipe leaves at null is the run's seed.

    Attributes:
        uses_alpha: whether the host's ``data_args.partition_alpha`` is passed on as ``alpha``.
        may_leave_out: whether some training examples may go to no client.
        long_tailed: whether results have the accuracies of head, middle and tail classes.
    """

    kind: ClassVar[str] = "partition"
    hook: ClassVar[str] = "calfat_partitions"
    uses_alpha: bool = False
    may_leave_out: bool = False
    long_tailed: bool = False


@dataclass(frozen=True)
class AttackerEntry(Entry):
    """An attacker. ``build(options)`` returns an ``interfaces.Attacker``.

    Attributes:
        sees_honest: whether ``sent`` looks at the models of the round's honest clients (``task.honest``).
    """

    kind: ClassVar[str] = "attacker"
    hook: ClassVar[str] = "calfat_attackers"
    sees_honest: bool = False


@dataclass(frozen=True)
class LoggerEntry(Entry):
    """A logger. ``build(options)`` returns an object with hooks of a run's life (``calfat_run_started`` ...).

    It is called for a run only if the recipe lists it under ``calfat.loggers``; see ``hookspecs``.
    """

    kind: ClassVar[str] = "logger"
    hook: ClassVar[str] = "calfat_loggers"


KINDS: tuple[type[Entry], ...] = tuple(Entry.__subclasses__())  #: in the order of this module


def kind_of(entry: Entry) -> type[Entry]:
    """The kind of an entry, which may be of a plugin's own subclass."""
    return next(kind for kind in KINDS if isinstance(entry, kind))
