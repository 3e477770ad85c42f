"""The typed recipe. Field help here is the reference documentation of the recipe format.

The host's sections keep the host's names and meaning; only the keys that we read are typed. ``host_keys`` says what
becomes of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, get_args

from calfat_plugin.maths.precision import CHOICES
from calfat_plugin.options import option
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.plugin_files import PluginFile
from calfat_plugin.recipe.silo import Silo
from calfat_plugin.recipe.training import TrainArgs
from calfat_plugin.threat import QUARTER, Norm, StepSize, ThreatModel

#: Training type to whether its runs have parties, which ``calfat.silo`` is about.
TRAINING_TYPES: Mapping[str, bool] = {"simulation": False, "cross_silo": True}


@dataclass(frozen=True)
class CommonArgs:
    """``common_args``: the kind of run."""

    training_type: str = option("simulation", choices=tuple(TRAINING_TYPES), help="runtime of the host")
    random_seed: int = option(
        0, low=0, high=2**32 - 1, help="seed of initial weights, client sampling, batches and attacks"
    )


@dataclass(frozen=True)
class DataArgs:
    """``data_args``: the data set and how it is split over clients."""

    dataset: str = option("digits", help="name of a data set")
    data_cache_dir: str = option("~/data", help="folder that holds the data sets and receives downloads")
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
        choices=("sp", "MPI", "GRPC", "MQTT_S3"),
        refused={"NCCL": "the host's NCCL simulator is not in its wheel (fedml 0.9.6, simulation/simulator.py:220)"},
        help="sp: one process; the others: one process per party",
    )


@dataclass(frozen=True)
class TrackingArgs:
    """``tracking_args``: tracking by FedML, off by default."""

    enable_wandb: bool = option(
        False, help="open a run of Weights & Biases through FedML; needs wandb_project; see also calfat.loggers"
    )


HOST_SECTIONS: Mapping[str, type] = {
    "common_args": CommonArgs,
    "data_args": DataArgs,
    "model_args": ModelArgs,
    "train_args": TrainArgs,
    "device_args": DeviceArgs,
    "comm_args": CommArgs,
    "tracking_args": TrackingArgs,
}


#: The keys of the section ``calfat``.
CALFAT_KEYS = (
    "name",
    "trainer",
    "aggregator",
    "threat",
    "evaluators",
    "monitor",
    "partition",
    "dataset",
    "model",
    "evaluation",
    "runtime",
    "silo",
    "loggers",
    "plugins",
    "reported",
)


@dataclass(frozen=True)
class Choice:
    """A plugin picked by name, with its raw options; ``registry`` and ``experiment`` give them meaning.

    Attributes:
        name: as the recipe spells it (``pgd20``).
        options: option name to raw value.
        path: its key path in the recipe.
        preset: name of a preset of the entry, or None.
        label: the name of its results, for evaluators; defaults to ``name``.
    """

    name: str
    options: Mapping[str, Any]
    path: KeyPath
    preset: str | None = None
    label: str = ""


@dataclass(frozen=True)
class TrainerChoice(Choice):
    """A local trainer with the loss modifier it composes with (None: the method's own default)."""

    loss: Choice | None = None


@dataclass(frozen=True)
class ThreatOptions:
    """``calfat.threat``: the budget of training and of evaluation."""

    norm: str = option("linf", choices=get_args(Norm), help="norm of the ball")
    eps: Fraction = option(Fraction(8, 255), low=0, help="radius of the ball", unit="fraction of the pixel range")
    step_size: StepSize = option(
        QUARTER,
        low=0,
        open_low=True,
        help="length of a step, in training and of evaluators that set none; a multiple of eps follows eps",
        unit="fraction of the pixel range",
    )
    steps: int = option(10, low=1, help="training steps K")


@dataclass(frozen=True)
class MonitorOptions:
    """``calfat.monitor``: evaluation of the global model during the run, on the validation split if there is one
    (``data_args.validation_share``), else on the test split."""

    every: int = option(1, low=1, help="rounds between evaluations; the last round is always evaluated")
    max_examples: int | None = option(
        None, low=1, help="evaluate on a fixed random subset of this many of its examples; null: all"
    )


@dataclass(frozen=True)
class EvaluationOptions:
    """``calfat.evaluation``: how evaluators run."""

    batch_size: int = option(500, low=1, help="test examples per batch; affects only speed and random starts")


@dataclass(frozen=True)
class RuntimeOptions:
    """``calfat.runtime``: how this machine is used."""

    threads: int | None = option(None, low=1, high=512, help="CPU threads of torch; null: torch's own choice")
    precision: str = option(
        "fp32",
        choices=CHOICES,
        help="arithmetic of training (evaluation is always fp32); tf32: on a GPU; auto: bf16 where the processor or "
        "the GPU has units for it, else fp32",
    )
    cuda_graphs: str = option(
        "never",
        choices=("auto", "always", "never"),
        help="capture attacks and training steps as CUDA graphs, same numbers; auto: on a GPU; always: refuse to "
        "train without a GPU; never: the default until benchmarks/gpu.py has passed on a card",
    )


@dataclass(frozen=True)
class Reported:
    """``calfat.reported``: what a paper reports for this recipe, shown next to the measured numbers.

    Attributes:
        source: where the numbers are published, such as ``arXiv:2205.14926, Table 1``.
        percent: label of an evaluator to accuracy in percent, as the source prints it.
    """

    source: str = ""
    percent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A recipe as an entry's ``check(options, recipe)`` sees it: structure, types and units are right.

    Each section is a field, each of its keys an attribute of that, typed, with its default where the recipe is silent:
    ``recipe.train.client_num_in_total``, ``recipe.data.partition_alpha``, ``recipe.monitor.every``. A preset of the
    trainer is filled in. Names of plugins have not been looked up.

    Attributes:
        name: ``calfat.name``, or the file's stem; its runs are in a folder of this name.
        document: raw values with their places; ``document.error(("calfat", "threat"), text)`` is an error with file,
            line and key.
        common: ``common_args``.
        data: ``data_args``.
        model: ``model_args``.
        train: ``train_args``.
        device: ``device_args``.
        comm: ``comm_args``.
        tracking: ``tracking_args``.
        host_extra: section to the keys that we only pass on to the host, which acts on them.
        trainer: the local trainer: ``name``, raw ``options``, ``preset``, and the loss modifier as ``loss`` or None.
        aggregator: the aggregator: ``name`` and raw ``options``, as of all plugins that follow.
        partition: ``data_args.partition_method`` with the options in ``calfat.partition``.
        dataset: ``data_args.dataset`` with the options in ``calfat.dataset``.
        model_choice: ``model_args.model`` with the options in ``calfat.model``.
        threat: ``calfat.threat``: the budget of training and evaluation.
        evaluators: at the end of the run; each has a ``label``.
        monitor: ``calfat.monitor``: how often, and on how many images.
        monitor_evaluators: during the run.
        evaluation: ``calfat.evaluation``: ``batch_size``.
        runtime: ``calfat.runtime``: ``threads``, ``precision``, ``cuda_graphs``.
        silo: the parties of a cross-silo run.
        loggers: further observers of the run.
        plugins: module name to plugin that is a single file.
        reported: what a paper reports for this recipe.
        warnings: findings that do not stop a run, each with its place.
    """

    name: str
    document: Document
    common: CommonArgs
    data: DataArgs
    model: ModelArgs
    train: TrainArgs
    device: DeviceArgs
    comm: CommArgs
    tracking: TrackingArgs
    host_extra: Mapping[str, Mapping[str, Any]]
    trainer: TrainerChoice
    aggregator: Choice
    partition: Choice
    dataset: Choice
    model_choice: Choice
    threat: ThreatModel
    evaluators: tuple[Choice, ...]
    monitor: MonitorOptions
    monitor_evaluators: tuple[Choice, ...]
    evaluation: EvaluationOptions
    runtime: RuntimeOptions
    silo: Silo = field(default_factory=Silo)
    loggers: tuple[Choice, ...] = ()
    plugins: Mapping[str, PluginFile] = field(default_factory=dict)
    reported: Reported = field(default_factory=Reported)
    warnings: tuple[str, ...] = field(default=())

    @property
    def clients_per_round(self) -> int:
        """Clients that train in a round."""
        return self.train.client_num_per_round or self.train.client_num_in_total
