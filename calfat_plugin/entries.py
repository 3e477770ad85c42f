"""Entries: the small typed objects with which a plugin says "I offer this name of this kind".

An entry describes a plugin (name, options, citation) and says what builds the plugin. All modules that make entries are
imported even where no plugin is built, so these imports must be fast. If the implementation imports torch, write
``build`` as a text, ``"package.module:Name"``: the implementation is then imported when a run needs the plugin.
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

_NAME = re.compile(r"[a-z][a-z0-9_-]*")  # name of an entry
_METRIC = re.compile(r"[a-z][a-z0-9_]*")  # name of a metric
_BUILD = re.compile(r"\w+(\.\w+)*:\w+")  # package.module:Name


# --- dataclasses that check the types of their fields -----------------------------------------------------------------


class _TypeChecked:
    """The base of dataclasses whose new objects check that each field's value has the type of the field's annotation.

    The author of a plugin thus sees a wrong type when the plugin is loaded, and not in the middle of a run.
    """

    def __post_init__(self) -> None:
        subject = type(self).__name__
        if isinstance(self, Entry):
            subject = f"{self.kind} '{self.name}'"
        type_of_field = _types_of_fields(type(self))  # type: ignore[arg-type]  # mypy takes classes for unhashable
        for declared in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, declared.name)
            if not _has_type(value, type_of_field[declared.name]):
                raise PluginError(f"{subject}: its {declared.name} is {reprlib.repr(value)}; expected {declared.type}.")


@functools.cache
def _types_of_fields(dataclass_type: type) -> dict[str, Any]:
    """Return field name to type. A dataclass itself has the types as texts, because its module postpones annotations.

    The result is cached: a registry makes a hundred entries, and would evaluate the texts again for each entry.
    """
    return typing.get_type_hints(dataclass_type)


def _has_type(value: Any, expected: Any) -> bool:
    """Whether a value has the expected type; the contents of mappings and tuples are checked too."""
    generic = typing.get_origin(expected)  # Mapping for Mapping[str, int]; None for int
    arguments = typing.get_args(expected)  # (str, int) for Mapping[str, int]; () for int
    if expected is Any:
        return True
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)  # bool is a subclass of int
    if generic in (typing.Union, types.UnionType):
        return any(_has_type(value, alternative) for alternative in arguments)
    if generic is Mapping:
        if not isinstance(value, Mapping):
            return False
        key_type, item_type = arguments
        return all(_has_type(key, key_type) and _has_type(item, item_type) for key, item in value.items())
    if generic is tuple:
        if not isinstance(value, tuple):
            return False
        element_types = arguments
        if len(arguments) == 2 and arguments[1] is ...:  # tuple[str, ...] has any number of elements of one type
            element_types = (arguments[0],) * len(value)
        if len(element_types) != len(value):
            return False
        return all(map(_has_type, value, element_types))
    if generic is not None:  # Callable[[Any], str], for example: any value that can be called is accepted
        return isinstance(value, generic)
    return isinstance(value, expected)


# --- papers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Citation(_TypeChecked):
    """A paper that the results of a run have to cite.

    Attributes:
        text: a short text for tables.
        bibtex: the BibTeX entry for the list of references.

    Raises:
        PluginError: a field is not of its type.
    """

    text: str
    bibtex: str = ""


@functools.cache
def _papers() -> dict[str, Citation]:
    """Return the papers of the built-in plugins: key in ``papers.bib`` to paper.

    In ``papers.bib``, an empty line separates two papers. Each paper is a comment line with the short text (``% text``)
    and a BibTeX entry.
    """
    paper_of_key = {}
    content = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    for block in content.strip().split("\n\n"):
        comment, bibtex = block.split("\n", 1)
        key = re.split("[{,]", bibtex)[1]  # @article{key, ...
        paper_of_key[key] = Citation(comment.removeprefix("% "), bibtex)
    return paper_of_key


def paper(key: str) -> Citation:
    """Return the paper of a built-in plugin that has this key in ``papers.bib``."""
    return _papers()[key]


# --- what all kinds of entries share ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset(_TypeChecked):
    """A named set of defaults.

    Attributes:
        help: one line for the user.
        options: option name to value, for the options of the entry itself.
        recipe: called with the name of the data set. Returns defaults for the rest of the recipe, as dotted key to
            value, such as ``{"train_args.weight_decay": 2e-3}``. These defaults fill keys that the recipe leaves out.

    Raises:
        PluginError: a field is not of its type.
    """

    help: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Callable[[str], Mapping[str, Any]] = lambda dataset: {}


@dataclass(frozen=True)
class Entry(_TypeChecked):
    """The fields that all kinds of entries share.

    Attributes:
        kind: the name of this kind in messages and lists.
        hook: the name of the hook by which plugins offer entries of this kind.
        reserved: keys that recipes use beside the options of a plugin. No option may have one of these names.
        reserved_metrics: names of what the package measures itself. No metric may have one of these names.
        name: the lower-case name that recipes use. With ``number_option``, a recipe may append a number to the name:
            ``pgd20`` means ``pgd`` with ``steps: 20``.
        build: the class or factory; or a text, ``"package.module:Name"``, to import it when a run needs it.
        config: the frozen dataclass of the options.
        summary: one line that says what the plugin is.
        formula: the defining formula in plain text; empty where there is none.
        citation: the paper that the plugin is from.
        presets: name to preset.
        number_option: the option that is set by a number at the end of the name; None: the name takes no number.
        check: called with (options, ``Recipe``) when a recipe that picks this plugin is checked, and once more for each
            group of clients that trains with the plugin. Raises ``OptionError`` for options that do not fit the rest of
            the recipe, such as more favoured clients than clients.
        warn: called as ``check`` is. Returns a warning of what is allowed and was probably not meant, or an empty text.
        idle: called with the options. Returns name to reason for each option that other options make useless. If a
            recipe gives such an option another value than the default, the user gets a warning.
        metrics: name to meaning of what a trainer, aggregator or evaluator measures beside loss and accuracy, such as
            ``{"margin": "mean margin of the true class"}``. Columns of ``rounds.csv`` are named after the metrics.

    Raises:
        PluginError: a field is not of its type, recipes could not write the name of the entry or of a metric, or
            recipes could not express the options.
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
        """Refuse a metric whose name cannot be written, or is the name of something that the package measures."""
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
        """Refuse options that recipes cannot express, and a preset or ``number_option`` with an unknown option."""
        subject = f"{self.kind} '{self.name}'"
        try:
            option_names = {info.name for info in describe_options(self.config)}
        except TypeError as error:
            raise PluginError(f"{subject}: {error}.") from None
        clashing = option_names.intersection(self.reserved)
        if clashing:
            raise PluginError(f"{subject} has an option '{min(clashing)}'; recipes use that key for something else.")

        mentioned: set[str] = set()
        for preset in self.presets.values():
            mentioned.update(preset.options)
        if self.number_option is not None:
            mentioned.add(self.number_option)
        unknown = mentioned - option_names
        if unknown:
            raise PluginError(f"{subject} refers to the option '{min(unknown)}', which it does not have.")

    @property
    def shown_name(self) -> str:
        """The name as lists show it. A name that takes a number is shown with the option: ``pgd<steps>``."""
        if self.number_option is None:
            return self.name
        return f"{self.name}<{self.number_option}>"

    def load(self) -> Callable[..., Any]:
        """Return the class or factory. If ``build`` is a text, import what the text names.

        Raises:
            PluginError: the text does not name something that can be imported and called.
        """
        if callable(self.build):
            return self.build
        problem = f"{self.kind} '{self.name}' cannot be built"
        if not _BUILD.fullmatch(self.build):
            raise PluginError(f"{problem}: its build is {self.build!r}; expected package.module:Name.")
        module_name, _, attribute = self.build.partition(":")
        try:
            build: object = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise PluginError(f"{problem}: {self.build!r} does not import ({error}).") from error
        if not callable(build):
            raise PluginError(f"{problem}: {self.build!r} is {one_line(build)}; expected a class or a function.")
        return build


# --- the kinds of entries ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerEntry(Entry):
    """A local trainer. ``build(options, modifier)`` returns an ``interfaces.LocalTrainer``.

    Attributes:
        modifiers: names of the loss modifiers that this method composes with; empty: the method has a loss of its own.
        reshapes: whether ``adapt_model`` changes the model's tensors. If one client trains with such a method, all
            clients have to train with this method, because the server averages one model.
        conflicts: name of an aggregator to the reason why this aggregator and this method cannot work together. Either
            of the two entries may declare the conflict.
    """

    kind: ClassVar[str] = "local trainer"
    hook: ClassVar[str] = "calfat_local_trainers"
    # "loss" picks the loss modifier. The other keys are additions to a method (``recipe/training.py``).
    reserved: ClassVar[tuple[str, ...]] = (*Entry.reserved, "loss", "label_smoothing", "awp", "clean_rounds")
    reserved_metrics: ClassVar[tuple[str, ...]] = ("loss", ALIGNMENT, PASSES)
    modifiers: tuple[str, ...] = ("plain",)
    reshapes: bool = False
    conflicts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModifierEntry(Entry):
    """A loss modifier. ``build(options)`` returns an ``interfaces.LossModifier``.

    Attributes:
        methods: names of further local trainers that this modifier composes with. A trainer whose ``modifiers`` name
            this modifier need not be listed. A trainer with empty ``modifiers`` composes with no modifier, listed or
            not.
        reshapes: whether the modifier changes the model's tensors, as ``reshapes`` of a trainer.
    """

    kind: ClassVar[str] = "loss modifier"
    hook: ClassVar[str] = "calfat_loss_modifiers"
    methods: tuple[str, ...] = ()
    reshapes: bool = False


@dataclass(frozen=True)
class InnerAttackEntry(Entry):
    """An attack of training. ``build(options)`` returns an ``interfaces.InnerAttack``.

    Attributes:
        steps: called with the options. Returns how many steps the attack takes, each with one call of the method's
            loss; None: the attack takes as many steps as ``calfat.threat.steps`` says.
        replays: called with the options. Returns how many steps the optimiser takes for a mini-batch.
        replaces: names of attributes of ``AdversarialTrainer`` that this attack replaces. A method that has its own
            version of one of these attributes is refused.
        by_class: whether the attack works if each example has an eps of its own (``calfat.threat.by_class``). True is
            right for an attack that starts, steps and projects by the methods of ``ThreatModel``, and gives these
            methods lengths in terms of eps.
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
        conflicts: name of a local trainer to the reason why this trainer and this aggregator cannot work together.
        beside_others: names out of ``conflicts``. These trainers are allowed for some of the clients, as long as other
            clients have a trainer that is not named here.
        uses_monitored_data: whether ``combine`` looks at the server's images (``task.monitored``). If these images are
            test images, the results say that the aggregator saw them.
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
        uses_clients: whether ``evaluate`` looks at the clients of the round (``task.clients``). Such an evaluator
            measures while a federation trains and at the end of training, and at no other time.
    """

    kind: ClassVar[str] = "evaluator"
    hook: ClassVar[str] = "calfat_evaluators"
    uses_clients: bool = False


@dataclass(frozen=True)
class DatasetEntry(Entry):
    """A data set. ``build(root, **options)`` returns a ``datasets.Dataset``.

    Attributes:
        num_classes: the number of classes; None: the files decide.
        image_shape: (channels, height, width) of the images; None: the files decide.
        per_party: whether each party of a cross-silo run can read its own part of the data. ``build`` then takes one
            more argument: ``only="train"`` for a client, ``only="test"`` for the server. With ``only``, ``build`` reads
            this split alone, and returns this split twice: as the training images and as the test images. The party
            uses one of the two.
        licence: the licence of the data, as the publisher states it; empty: not known.
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
        min_size: called with the options. Returns the side of the smallest image that the model takes, in pixels. A
            recipe is refused if the images of the data set are known to be smaller.
    """

    kind: ClassVar[str] = "model"
    hook: ClassVar[str] = "calfat_models"
    min_size: Callable[[Any], int] = lambda options: 1


@dataclass(frozen=True)
class PartitionEntry(Entry):
    """A partition. ``build(labels, num_clients, **options)`` returns one index array for each client.

    If the options have a ``seed`` and the recipe leaves it at null, ``build`` gets the seed of the run.

    Attributes:
        uses_alpha: whether ``build`` gets ``data_args.partition_alpha``, a key of the host, as its argument ``alpha``.
        may_leave_out: whether the partition may leave some training examples to no client.
        long_tailed: whether the results list the accuracies of head, middle and tail classes.
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

    The hooks are called only for runs whose recipe lists the logger under ``calfat.loggers``; see ``hookspecs``.
    """

    kind: ClassVar[str] = "logger"
    hook: ClassVar[str] = "calfat_loggers"


#: The classes above, in the order of this module. A plugin may derive a class from one of them; that is no new kind.
KINDS: tuple[type[Entry], ...] = tuple(Entry.__subclasses__())


def kind_of(entry: Entry) -> type[Entry]:
    """Return the class of :data:`KINDS` to which an entry belongs; a plugin may have derived the entry's own class."""
    return next(kind for kind in KINDS if isinstance(entry, kind))
