"""The sections of a recipe. Field help here is the reference documentation of the recipe format.

The host's sections keep the host's names and meaning. The keys here are those that act; ``host_sections`` says what
becomes of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from calfat_plugin import entries
from calfat_plugin.datasets.entries import DownloadOptions, MemoryOptions
from calfat_plugin.layouts import AUTO
from calfat_plugin.layouts import CHOICES as LAYOUTS
from calfat_plugin.maths.passes import PRECISIONS
from calfat_plugin.options import OptionInfo, Tag, option, options_to_plain, tagged
from calfat_plugin.recipe.clients import GroupOptions
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.keys import (
    Groups,
    OnePlugin,
    OptionsOf,
    Others,
    Plugin,
    Plugins,
    Section,
    Sections,
    as_plain,
    key,
    keys_of,
)
from calfat_plugin.recipe.plugin_files import PluginFile, PluginFileOptions
from calfat_plugin.recipe.silo import Silo
from calfat_plugin.recipe.training import (
    BY_CLASS_PAPER,
    EMA_PAPER,
    Additions,
    ByClassOptions,
    EMAOptions,
    TrainArgs,
    useless,
)
from calfat_plugin.results import NATURAL
from calfat_plugin.threat import ThreatModel

#: Training type to whether its runs have parties, which ``calfat.silo`` is about.
TRAINING_TYPES: Mapping[str, bool] = {"simulation": False, "cross_silo": True}


class Host(NamedTuple):
    """A framework that runs rounds: its name for people, and its distribution."""

    title: str
    distribution: str


#: By the name that recipes give.
HOSTS: Mapping[str, Host] = {"fedml": Host("FedML", "fedml"), "flower": Host("Flower", "flwr")}

#: How parties of FedML communicate; in a simulation, MPI is FedML's name for an executor.
BACKENDS = ("sp", "MPI", "GRPC", "MQTT_S3")

#: Executors by name: what trains the clients of a simulation side by side.
PROCESSES, MPI, DASK = "processes", "mpi", "dask"


@dataclass(frozen=True)
class CommonArgs:
    """``common_args``: the kind of run."""

    host: str = tagged(
        Tag.FREE,  # whatever runs the rounds: the same bits
        option(
            "fedml", choices=tuple(HOSTS), help="the framework that runs the rounds; flower needs the extra `flower`"
        ),
    )
    training_type: str = option("simulation", choices=tuple(TRAINING_TYPES), help="runtime of the host")
    random_seed: int = tagged(
        Tag.NO_SETTING | Tag.NO_DIGEST,
        option(
            0, low=0, high=2**32 - 1, help="seed of initial weights, partition, client sampling, batches and attacks"
        ),
    )


@dataclass(frozen=True)
class DataArgs:
    """``data_args``: the data set and how it is split over clients."""

    dataset: str = option("digits", help="name of a data set")
    data_cache_dir: str = tagged(
        Tag.FREE | Tag.OF_A_PARTY,  # the same data in another place
        option("~/data", help="folder that holds the data sets and receives downloads"),
    )
    partition_method: str = option("dirichlet", help="name of a partition")
    partition_alpha: float = option(
        0.1, low=0, open_low=True, help="Dirichlet concentration beta of the label skew; smaller is more skewed"
    )
    max_train_examples: int | None = option(
        None, low=1, help="train on a fixed choice of this many examples, the same share of each class; null: all"
    )
    max_test_examples: int | None = option(
        None, low=1, help="test on a fixed choice of this many examples, the same share of each class; null: all"
    )
    validation_share: float = option(
        0.0,
        low=0,
        high=0.5,
        help="share of the training set that no client trains on, of each class alike; monitoring and best checkpoints "
        "use it instead of the test split. With partition_method: silo, the share of the server's own images",
    )

    @property
    def monitored_split(self) -> str:
        """What the global model is evaluated on during a run: ``validation`` or ``test``."""
        return "validation" if self.validation_share else "test"


@dataclass(frozen=True)
class ModelArgs:
    """``model_args``: the model."""

    model: str = option("cnn", help="name of a model, or package.module:factory of your own")


@dataclass(frozen=True)
class DeviceArgs:
    """``device_args``: where to compute."""

    using_gpu: bool = option(False, help="train on the GPU if there is one, else on the CPU with a warning")
    gpu_id: int = option(0, low=0, help="which GPU")


@dataclass(frozen=True)
class CommArgs:
    """``comm_args``: how parties communicate."""

    backend: str = option(
        "sp",
        choices=BACKENDS,
        help="sp: one process; GRPC, MQTT_S3: one process per party; MPI, in a simulation: as "
        "`calfat.runtime.executor: mpi`",
    )


@dataclass(frozen=True)
class HostSections:
    """The sections of a recipe that the host has, too."""

    common_args: CommonArgs = key(Section(config=CommonArgs))
    data_args: DataArgs = tagged(Tag.PROBLEM | Tag.MEASURED, key(Section(config=DataArgs)))
    model_args: ModelArgs = tagged(Tag.PROBLEM, key(Section(config=ModelArgs)))
    train_args: TrainArgs = key(Section(config=TrainArgs))
    device_args: DeviceArgs = tagged(
        Tag.FREE | Tag.OF_A_PARTY,  # a run may move to another machine; environment.json describes each
        key(Section(config=DeviceArgs)),
    )
    comm_args: CommArgs = tagged(
        Tag.FREE | Tag.OF_A_PARTY | Tag.SECRET,  # whatever carries the messages: the same bits
        key(Section(config=CommArgs)),
    )


HOST_SECTIONS: Mapping[str, type] = {
    name: section.config for name, section in keys_of(HostSections).items() if isinstance(section, Section)
}


@dataclass(frozen=True)
class Threat(ThreatModel):
    """``calfat.threat``: the budget of training and of evaluation, and how training searches it."""

    inner: Plugin[entries.InnerAttackEntry] = key(
        OnePlugin(
            "the attack of training; `pgd` takes `steps` steps of `step_size`, the others their own",
            kind=entries.InnerAttackEntry,
            default="pgd",
            written=False,
        )
    )
    by_class: ByClassOptions | None = key(Section(config=ByClassOptions, may_lack=True), default_factory=lambda: None)

    @property
    def own_steps(self) -> int | None:
        """The steps that the inner attack takes whatever ``steps`` says; None: it goes by ``steps``."""
        return self.inner.entry.steps(self.inner.options)

    @property
    def in_training(self) -> Threat:
        """With the steps that the inner attack takes."""
        if self.own_steps is None:
            return self
        return dataclasses.replace(self, steps=self.own_steps)


@dataclass(frozen=True)
class Monitor:
    """``calfat.monitor``: evaluation of the global model during the run, on the validation split if there is one
    (``data_args.validation_share``), else on the test split."""

    every: int = option(1, low=1, help="rounds between evaluations; the last round is always evaluated")
    max_examples: int | None = option(
        None, low=1, help="evaluate on a fixed random subset of this many of its examples; null: all"
    )
    evaluators: tuple[Plugin[entries.EvaluatorEntry], ...] = key(
        Plugins(
            "what measures it during the run",
            kind=entries.EvaluatorEntry,
            default=("natural", "pgd20"),
            example="[natural, pgd20]",
        ),
        default_factory=tuple,
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the evaluators, in their order."""
        return tuple(plugin.label for plugin in self.evaluators)


@dataclass(frozen=True)
class EvaluationOptions:
    """``calfat.evaluation``: how evaluators run."""

    batch_size: int = option(500, low=1, help="test examples per batch; affects only speed and random starts")
    evidence_mb: int = tagged(
        Tag.FREE,
        option(
            16,
            low=0,
            help="room in 10^6 bytes for adversarial images of the final evaluation, which `calfat replay` checks its "
            "numbers by; 0: none are kept",
        ),
    )


@dataclass(frozen=True)
class RuntimeOptions:
    """``calfat.runtime``: how this machine is used."""

    threads: int | None = tagged(
        Tag.OF_A_PARTY,
        option(None, low=1, high=512, help="CPU threads of torch; null: torch's own choice"),
        fixed_because="A different number of threads changes the order of sums, so the last bits of the result would "
        "differ",
    )
    precision: str = tagged(
        Tag(0),
        option(
            "fp32",
            choices=PRECISIONS,
            help="arithmetic of training (evaluation is always fp32); tf32: on a GPU; auto: bf16 where the processor "
            "or the GPU has units for it, else fp32",
        ),
        fixed_because="Rounds in different arithmetic would make a model of neither",
    )
    layout: str = tagged(
        Tag(0),
        option(
            AUTO,
            choices=LAYOUTS,
            help="memory layout of convolutions: channels_last is faster and differs from contiguous in the last bits; "
            "auto: channels_last, or contiguous where a trial in a process of its own shows that this processor "
            "crashes in it (strided 1x1 convolutions with few channels)",
        ),
        fixed_because="Another memory layout changes the order of sums, so the last bits of the result would differ",
    )
    executor: str = tagged(
        Tag.FREE,  # whoever trains the clients: the same bits
        option(
            PROCESSES,
            help="what trains the clients of a simulation: processes (this one, or `--workers N` of this machine), "
            "mpi, dask, or package.module:factory of a `concurrent.futures.Executor`",
        ),
    )
    scheduler: str | None = tagged(
        Tag.FREE, option(None, help="address of Dask's scheduler, such as tcp://10.0.0.1:8786; null: no Dask")
    )


@dataclass(frozen=True)
class FlowerOptions:
    """``calfat.flower``: what each client of Flower's simulation is given of this machine or of a Ray cluster."""

    client_cpus: float | None = option(
        None, low=0, open_low=True, help="cores of a client; null: `calfat.runtime.threads`, or all of this machine"
    )
    client_gpus: float | None = option(
        None, low=0, help="GPUs of a client, 0.25 for a quarter; null: 1 with `device_args.using_gpu`, else 0"
    )


_PERCENT = OptionInfo(
    "<label>", float, False, None, True, help="accuracy in percent, as in the source", low=0, high=100
)


@dataclass(frozen=True)
class Reported:
    """``calfat.reported``: what a paper reports for this recipe, shown next to the measured numbers."""

    source: str = option("", help="where the numbers are published, such as `arXiv:2205.14926, Table 1`")
    percent: Mapping[str, float] = key(Others(info=_PERCENT), default_factory=dict)  #: by the label of an evaluator


@dataclass(frozen=True)
class ClientGroup:
    """A group of clients; ``recipe``, by which they train, is the run's with the group's keys."""

    name: str
    options: GroupOptions
    ids: tuple[int, ...] | None  #: None where they are chosen otherwise
    recipe: Recipe
    attacker: Plugin[entries.AttackerEntry] | None
    changed: tuple[str, ...]  #: keys beside the options that the recipe gives it, in full
    path: KeyPath

    def as_run(self) -> dict[str, Any]:
        """The group as a recipe writes it in full."""
        plain = {name: value for name, value in options_to_plain(self.options).items() if value is not None}
        plain["name"] = self.name
        if self.ids is not None:
            plain["ids"] = list(self.ids)
        if "trainer" in self.changed:
            plain["trainer"] = self.recipe.trainer.as_run()
        if "threat" in self.changed:
            plain["threat"] = as_plain(self.recipe.threat, Threat)
        if "inner" in self.changed:  # also where it is the default: the run's may be another
            plain["threat"]["inner"] = self.recipe.threat.inner.as_run()
        if "by_class" in self.changed:  # also where it has none: the run may have one
            plain["threat"].setdefault("by_class", None)
        if self.attacker is not None:
            plain["attacker"] = self.attacker.as_run()
        return plain


@dataclass(frozen=True)
class CalfatSection:
    """``calfat``: what is trained and measured, and how."""

    # Each key of the section is a field here and nowhere else.

    name: str | None = tagged(
        Tag.NO_SETTING | Tag.NO_DIGEST,
        option(None, help="name of the runs of this recipe and of their folder; null: the file's name"),
    )
    trainer: Plugin[entries.TrainerEntry] = key(
        OnePlugin(
            "`preset` selects a set of defaults, `loss` a loss modifier", kind=entries.TrainerEntry, default="calfat"
        )
    )
    aggregator: Plugin[entries.AggregatorEntry] = key(
        OnePlugin("the server's algorithm", kind=entries.AggregatorEntry, default="fedavg")
    )
    ema: EMAOptions | None = key(Section(config=EMAOptions, may_lack=True))
    clients: tuple[ClientGroup, ...] = key(Groups("clients that differ from the others", config=GroupOptions))
    threat: Threat = tagged(Tag.PROBLEM, key(Section(config=Threat)))
    evaluators: tuple[Plugin[entries.EvaluatorEntry], ...] = tagged(
        Tag.MEASURED | Tag.OF_A_PARTY | Tag.NAMED_LAST,
        key(
            Plugins(
                "what measures the final model; `label` renames one, so that it can be listed twice",
                kind=entries.EvaluatorEntry,
                default=("natural", "fgsm", "pgd20"),
                example="[natural, pgd20]",
            )
        ),
        fixed_because="Two settings under one label would be mixed: give the new one a label of its own",
    )
    monitor: Monitor = tagged(Tag.MEASURED | Tag.OF_A_PARTY | Tag.NAMED_LAST, key(Section(config=Monitor)))
    partition: Plugin[entries.PartitionEntry] = tagged(
        Tag.PROBLEM | Tag.MEASURED,
        key(OptionsOf(kind=entries.PartitionEntry, named_by=("data_args", "partition_method"))),
    )
    dataset: Plugin[entries.DatasetEntry] = tagged(
        Tag.PROBLEM | Tag.MEASURED,
        key(
            OptionsOf(
                kind=entries.DatasetEntry,
                named_by=("data_args", "dataset"),
                configs=(DownloadOptions, MemoryOptions),
            )
        ),
    )
    model: Plugin[entries.ModelEntry] = tagged(
        Tag.PROBLEM, key(OptionsOf(kind=entries.ModelEntry, named_by=("model_args", "model")))
    )
    evaluation: EvaluationOptions = tagged(
        Tag.MEASURED | Tag.OF_A_PARTY | Tag.NAMED_LAST, key(Section(config=EvaluationOptions))
    )
    runtime: RuntimeOptions = tagged(Tag.NO_SETTING, key(Section(config=RuntimeOptions)))
    loggers: tuple[Plugin[entries.LoggerEntry], ...] = tagged(
        Tag.FREE | Tag.OF_A_PARTY,
        key(Plugins("further observers of the run", kind=entries.LoggerEntry, example="[tensorboard]")),
    )
    reported: Reported = tagged(Tag.FREE | Tag.OF_A_PARTY | Tag.MEASURED, key(Section(config=Reported)))
    plugins: Mapping[str, PluginFile] = tagged(
        Tag.NAMED_LAST,
        key(Sections(config=PluginFileOptions, named="module")),
        fixed_because="Rounds with different versions of a plugin would make a model of neither",
    )
    silo: Silo = tagged(
        Tag.FREE | Tag.OF_A_PARTY,  # addresses, and how patient the parties are
        key(Section(config=Silo)),
    )
    flower: FlowerOptions = tagged(
        Tag.FREE | Tag.OF_A_PARTY,  # how many clients train at a time
        key(Section(config=FlowerOptions)),
    )


#: The keys of the section ``calfat``.
CALFAT_KEYS = tuple(field.name for field in dataclasses.fields(CalfatSection))


@dataclass(frozen=True, kw_only=True)
class Recipe(CalfatSection):
    """A recipe, typed: structure, types and units are right, names have been looked up, defaults filled in.

    Each key of the section ``calfat`` is an attribute, and each section of the host is one with typed attributes of its
    own: ``recipe.threat.eps``, ``recipe.monitor.every``, ``recipe.train.client_num_in_total``.

    Attributes:
        name: ``calfat.name``, or the file's stem; its runs are in a folder of this name.
        document: raw values with their places; ``document.error(("calfat", "threat"), text)`` is an error with file,
            line and key.
        common: ``common_args``.
        data: ``data_args``.
        model_args: ``model_args``; the model itself is ``recipe.model``.
        train: ``train_args``.
        device: ``device_args``.
        comm: ``comm_args``.
        warnings: findings that do not stop a run, each with its place.
    """

    name: str
    document: Document
    common: CommonArgs
    data: DataArgs
    model_args: ModelArgs
    train: TrainArgs
    device: DeviceArgs
    comm: CommArgs
    warnings: tuple[str, ...] = ()

    @property
    def clients_per_round(self) -> int:
        """Clients that train in a round."""
        return self.train.client_num_per_round or self.num_clients

    @property
    def modifier(self) -> Plugin[entries.ModifierEntry]:
        """The loss modifier that the local trainer composes with; ``plain`` where the recipe names none."""
        assert self.trainer.loss is not None  # as experiment.resolve has it
        return self.trainer.loss

    @property
    def additions(self) -> Additions:
        """What is added to the local trainer."""
        assert isinstance(self.trainer.additions, Additions)  # as experiment.resolve has it
        return self.trainer.additions

    @property
    def seed(self) -> int:
        """The run's seed, from which every random stream is derived."""
        return self.common.random_seed

    @property
    def executor(self) -> str:
        """What trains the clients of a simulation; ``--workers`` has precedence."""
        if self.comm.backend == "MPI" and self.runtime.executor == PROCESSES:
            return MPI
        return self.runtime.executor

    @property
    def host(self) -> Host:
        """What runs the rounds."""
        return HOSTS[self.common.host]

    @property
    def num_clients(self) -> int:
        """Clients in total."""
        return self.train.client_num_in_total

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.train.comm_round

    @property
    def selecting_label(self) -> str | None:
        """Whose monitored accuracy says which round is best: the last attack of the monitor, which recipes list from
        weak to strong; without an attack ``natural``; None without either."""
        for label in reversed(self.monitor.labels):
            if label != NATURAL:
                return label
        if self.monitor.labels:
            return NATURAL
        return None

    @property
    def host_sections(self) -> dict[str, Any]:
        """The host's sections of the recipe, typed, by name."""
        return {name: getattr(self, attribute) for name, attribute in HOST_ATTRIBUTES.items()}

    @property
    def picked(self) -> tuple[Plugin[Any], ...]:
        """All plugins of the recipe, in the order in which they are checked."""
        training = (self.trainer, self.modifier, self.threat.inner)
        one_of_each = (*training, self.aggregator, self.dataset, self.model, self.partition)
        attackers = [group.attacker for group in self.clients if group.attacker is not None]
        return (*one_of_each, *attackers, *self.evaluators, *self.monitor.evaluators, *self.loggers)

    def citations(self) -> tuple[entries.Citation, ...]:
        """What this run owes a citation, without repetition."""
        recipes = [self, *(group.recipe for group in self.clients)]
        plugins = list(self.picked)
        for recipe in recipes:
            plugins += [recipe.trainer, recipe.modifier, recipe.threat.inner]
        citations = []
        for plugin in plugins:
            if plugin.entry.citation is not None:
                citations.append(plugin.entry.citation)
        for recipe in recipes:
            citations += recipe.additions.citations()
        if any(recipe.threat.by_class is not None for recipe in recipes):
            citations.append(BY_CLASS_PAPER)
        if self.ema is not None:
            citations.append(EMA_PAPER)
        return tuple(dict.fromkeys(citations))

    def as_run(self) -> dict[str, Any]:
        """The recipe in full: every default, preset and derived value written out. Parsing it gives this experiment."""
        # Keys of no effect are left out: read again, they would draw a warning. So is a section that does not act,
        # unless the recipe has it.
        sections = {name: options_to_plain(values) for name, values in self.host_sections.items()}
        if self.common.host == CommonArgs.host:
            del sections["common_args"]["host"]
        if not self.partition.entry.uses_alpha:
            del sections["data_args"]["partition_alpha"]
        sections["model_args"]["model"] = self.model.name  # of a network in a file, with its name there
        train = sections["train_args"]
        train["client_num_per_round"] = self.clients_per_round
        del train["federated_optimizer"]
        for name, _ in useless(self.train):
            train[name] = getattr(TrainArgs, name)
        section = as_plain(self, CalfatSection)
        del section["name"]  # of the recipe's file, not of what it says
        if not self.plugins:
            del section["plugins"]
        has_parties = TRAINING_TYPES[self.common.training_type]
        if not has_parties and not self.document.has(("calfat", "silo")):
            del section["silo"]
        if self.common.host != "flower" and not self.document.has(("calfat", "flower")):
            del section["flower"]
        return {**sections, "calfat": section}


#: Section of the host to the attribute of a recipe that has it.
HOST_ATTRIBUTES = {name: name.removesuffix("_args") for name in HOST_SECTIONS} | {"model_args": "model_args"}
