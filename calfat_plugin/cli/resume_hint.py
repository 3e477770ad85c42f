"""What a run that ends early keeps, and how to resume it."""

from __future__ import annotations

import shlex

from calfat_plugin.experiment import Experiment
from calfat_plugin.progress import ShownProgress
from calfat_plugin.runs.directory import RunDirectory


class ResumeHint:
    """What to print when this process's run ends early."""

    def __init__(self, command: list[str], resumed: bool) -> None:
        self.command = command  # without where to write; what is added to it is said to the user, too
        self._resumed = resumed  # the run was begun by an earlier process
        self.directory: RunDirectory | None = None  # once there is one
        self.experiment: Experiment | None = None  # likewise
        self.progress = ShownProgress()
        self.is_ours = True  # and not written by a process that this one has started
        self.last_words: str | None = None  # of a process without a run directory of its own

    def after_stop(self) -> str:
        """What to say when the user stopped the run."""
        if self.last_words is not None:
            return self.last_words
        if self.directory is None or self._discarded(self.directory):
            return "stopped. No round was finished, so nothing is kept."
        if self.directory.finished and not self.progress.owes_round:  # else they are the results of fewer rounds
            if self.experiment is not None and self.directory.not_measured(self.experiment):
                return f"stopped. What was measured before is kept. {self._how_to_resume(self.directory)}"
            return f"stopped. The run itself is finished: {self.directory.path}.{self.directory.without_page}"
        return f"stopped. {self._how_to_resume(self.directory)}"

    def after_error(self) -> str:
        """What to say below an error: nothing, where a resumed run would only meet it again."""
        if self.directory is None:
            return ""
        keeps_log = self.progress.in_rounds and self.is_ours
        if self._discarded(self.directory, keep_log=keeps_log):
            return f"No round was finished. The log is kept: {self.directory.log}" if keeps_log else ""
        return self._how_to_resume(self.directory) if self.progress.begun else ""

    def _discarded(self, directory: RunDirectory, *, keep_log: bool = False) -> bool:
        """Remove a run of this process in which no round was finished; whether it was so."""
        if self._resumed:
            return False
        return directory.discard(keep_log=keep_log) if self.is_ours else not directory.last_checkpoint.exists()

    def _how_to_resume(self, directory: RunDirectory) -> str:
        how = shlex.join([*self.command, "--resume", "--run-dir", str(directory.path)])
        return f"Finished rounds are kept in {directory.path}. Resume with:\n  {how}"
