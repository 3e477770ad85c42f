"""Federated adversarial training as plugins for FedML; docs/python.md describes everything that is public here."""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin import compat

if TYPE_CHECKING:  # every public name, once: type checkers and editors read these lines, and so does _HOME
    from calfat_plugin.analyses.in_memory import attack as attack
    from calfat_plugin.analyses.in_memory import evaluate as evaluate
    from calfat_plugin.analyses.replay import Replay as Replay
    from calfat_plugin.api import export as export
    from calfat_plugin.api import load_dataset as load_dataset
    from calfat_plugin.api import load_model as load_model
    from calfat_plugin.api import load_run as load_run
    from calfat_plugin.api import replay as replay
    from calfat_plugin.api import run as run
    from calfat_plugin.api import trust as trust
    from calfat_plugin.datasets import Augmentation as Augmentation
    from calfat_plugin.datasets import Dataset as Dataset
    from calfat_plugin.datasets import ImageData as ImageData
    from calfat_plugin.entries import AggregatorEntry as AggregatorEntry
    from calfat_plugin.entries import AttackerEntry as AttackerEntry
    from calfat_plugin.entries import Citation as Citation
    from calfat_plugin.entries import DatasetEntry as DatasetEntry
    from calfat_plugin.entries import EvaluatorEntry as EvaluatorEntry
    from calfat_plugin.entries import InnerAttackEntry as InnerAttackEntry
    from calfat_plugin.entries import LoggerEntry as LoggerEntry
    from calfat_plugin.entries import ModelEntry as ModelEntry
    from calfat_plugin.entries import ModifierEntry as ModifierEntry
    from calfat_plugin.entries import PartitionEntry as PartitionEntry
    from calfat_plugin.entries import Preset as Preset
    from calfat_plugin.entries import TrainerEntry as TrainerEntry
    from calfat_plugin.errors import BudgetError as BudgetError
    from calfat_plugin.errors import CalfatError as CalfatError
    from calfat_plugin.errors import DataError as DataError
    from calfat_plugin.errors import HostError as HostError
    from calfat_plugin.errors import ModelError as ModelError
    from calfat_plugin.errors import OptionError as OptionError
    from calfat_plugin.errors import PluginError as PluginError
    from calfat_plugin.errors import RecipeError as RecipeError
    from calfat_plugin.errors import RunError as RunError
    from calfat_plugin.errors import UpdateError as UpdateError
    from calfat_plugin.evaluators.base import AttackEvaluator as AttackEvaluator
    from calfat_plugin.evaluators.base import BudgetedAttack as BudgetedAttack
    from calfat_plugin.evaluators.base import BudgetOptions as BudgetOptions
    from calfat_plugin.exporting.folder import Export as Export
    from calfat_plugin.hookspecs import hookimpl as hookimpl
    from calfat_plugin.interfaces import ActiveCorrection as ActiveCorrection
    from calfat_plugin.interfaces import Aggregate as Aggregate
    from calfat_plugin.interfaces import AggregationTask as AggregationTask
    from calfat_plugin.interfaces import Aggregator as Aggregator
    from calfat_plugin.interfaces import AttackBatch as AttackBatch
    from calfat_plugin.interfaces import Attacker as Attacker
    from calfat_plugin.interfaces import AttackTask as AttackTask
    from calfat_plugin.interfaces import ClientLoss as ClientLoss
    from calfat_plugin.interfaces import EvaluationTask as EvaluationTask
    from calfat_plugin.interfaces import Evaluator as Evaluator
    from calfat_plugin.interfaces import InnerAttack as InnerAttack
    from calfat_plugin.interfaces import InnerTask as InnerTask
    from calfat_plugin.interfaces import LocalCorrection as LocalCorrection
    from calfat_plugin.interfaces import LocalTask as LocalTask
    from calfat_plugin.interfaces import LocalTrainer as LocalTrainer
    from calfat_plugin.interfaces import LossModifier as LossModifier
    from calfat_plugin.interfaces import MonitoredData as MonitoredData
    from calfat_plugin.interfaces import RoundClients as RoundClients
    from calfat_plugin.interfaces import RoundEnd as RoundEnd
    from calfat_plugin.interfaces import SetUpTask as SetUpTask
    from calfat_plugin.interfaces import TrainBatch as TrainBatch
    from calfat_plugin.interfaces import TrainSettings as TrainSettings
    from calfat_plugin.judging.verdict import Verdict as Verdict
    from calfat_plugin.maths.averaging import weighted_average as weighted_average
    from calfat_plugin.models.base import ImageClassifier as ImageClassifier
    from calfat_plugin.options import NoOptions as NoOptions
    from calfat_plugin.options import option as option
    from calfat_plugin.recipe.schema import Recipe as Recipe
    from calfat_plugin.registry import Registry as Registry
    from calfat_plugin.results import EvaluationResult as EvaluationResult
    from calfat_plugin.results import LocalUpdate as LocalUpdate
    from calfat_plugin.results import RoundRecord as RoundRecord
    from calfat_plugin.results import RunInfo as RunInfo
    from calfat_plugin.results import RunResult as RunResult
    from calfat_plugin.seeds import derive_seed as derive_seed
    from calfat_plugin.seeds import generator as generator
    from calfat_plugin.stored_run import Run as Run
    from calfat_plugin.threat import ThreatModel as ThreatModel
    from calfat_plugin.trainers.base import AdversarialTrainer as AdversarialTrainer
    from calfat_plugin.version import __version__ as __version__

#: Public name to the module it is imported from, on first use: ``import calfat_plugin`` imports none of them.
_HOME = {
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("calfat_plugin.")
    for alias in node.names
}
compat.make_torchvision_importable()  # networks and plugins of users import it, and so does FedML

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
