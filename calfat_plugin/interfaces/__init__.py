"""The contract of local trainers, loss modifiers, inner attacks, aggregators, attackers and evaluators.

All of them are stateless: one object may serve every client and every round. What a client or the server keeps
between rounds is a flat mapping from name to tensor that is handed in and handed back, so that the runtime can store,
send and checkpoint it. Derive from a class below, or from its built-in child that does most of the work
(``trainers.base.AdversarialTrainer``, ``evaluators.base.AttackEvaluator``).
"""

from calfat_plugin.interfaces.aggregation import (
    Aggregate,
    AggregationTask,
    Aggregator,
    Attacker,
    AttackTask,
    MonitoredData,
)
from calfat_plugin.interfaces.evaluation import EvaluationTask, Evaluator, RoundClients, SetUpTask
from calfat_plugin.interfaces.losses import AttackBatch, ClientLoss, InnerTask, LossModifier
from calfat_plugin.interfaces.trainers import LocalTrainer, RoundEnd
from calfat_plugin.interfaces.training import (
    ActiveCorrection,
    InnerAttack,
    LocalCorrection,
    LocalTask,
    TrainBatch,
    TrainSettings,
)
from calfat_plugin.results import State

__all__ = [
    "ActiveCorrection",
    "Aggregate",
    "AggregationTask",
    "Aggregator",
    "AttackBatch",
    "AttackTask",
    "Attacker",
    "ClientLoss",
    "EvaluationTask",
    "Evaluator",
    "InnerAttack",
    "InnerTask",
    "LocalCorrection",
    "LocalTask",
    "LocalTrainer",
    "LossModifier",
    "MonitoredData",
    "RoundClients",
    "RoundEnd",
    "SetUpTask",
    "State",
    "TrainBatch",
    "TrainSettings",
]
