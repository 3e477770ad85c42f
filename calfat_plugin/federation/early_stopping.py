"""Early stopping: training ends when the validation accuracy of the global model no longer rises."""

from __future__ import annotations

from collections.abc import Iterable

from calfat_plugin.experiment import Experiment
from calfat_plugin.results import EarlyStop, RoundRecord


class Patience:
    """Counts the monitored evaluations since the best one.

    It counts evaluations, and not rounds: only an evaluation can say that nothing was gained. Those of rounds that
    ``calfat.monitor.every`` divides count. The last round is evaluated in any case, but a run that goes further from
    there would not have had this evaluation, and it must end in the same round.

    Everything follows from the recipe and from the finished rounds, so a resumed run stops in the same round.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._patience = experiment.train.patience
        self._every = experiment.monitor.every
        self._num_rounds = experiment.num_rounds
        self._label = experiment.selecting_label
        self._best_round = 0
        self._best = -1.0
        self._in_vain = 0  # evaluations since the best one
        self.stop: EarlyStop | None = None  #: why and after which round training ends; None while it goes on

    def read(self, records: Iterable[RoundRecord]) -> None:
        """Take in the rounds that a resumed run has behind it."""
        for record in records:
            self.add(record.round, record.accuracy(self._label or ""))

    def add(self, round: int, accuracy: float | None) -> None:
        """Take in a round with the accuracy that was monitored after it; None: there was no evaluation.

        After the recipe's last round training ends anyway, and not early.
        """
        if self._patience is None or self.stop is not None or accuracy is None:
            return
        if round % self._every or round >= self._num_rounds:
            return
        if accuracy > self._best:
            self._best = accuracy
            self._best_round = round
            self._in_vain = 0
            return
        self._in_vain += 1
        if self._in_vain == self._patience:
            assert self._label is not None  # its accuracy was given
            self.stop = EarlyStop(round, self._patience, self._label, self._best_round, self._best)

    def may_end_with(self, round: int) -> bool:
        """Whether the evaluation of this round, which is to come, decides on the next round."""
        return self._patience is not None and round % self._every == 0 and self._in_vain + 1 >= self._patience


def early_stop(experiment: Experiment, records: Iterable[RoundRecord]) -> EarlyStop | None:
    """Why a run with these rounds behind it has no further one to do; None: it has, or did all that it has."""
    patience = Patience(experiment)
    patience.read(records)
    return patience.stop


def is_more_patient(asked: int | None, before: int | None) -> bool:
    """Whether a run with ``train_args.patience: asked`` may go on where one with ``before`` ended."""
    return before is not None and (asked is None or asked > before)
