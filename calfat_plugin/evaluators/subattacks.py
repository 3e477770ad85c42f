"""pyautoattack's sub-attacks, one batch at a time, exactly as its own loop would call them.

``pyautoattack.AutoAttack.run_standard_evaluation`` cannot be stopped and resumed (the state it writes does not load),
and it re-checks the clean images on every call. Its sub-attacks seed themselves anew for every batch, so that calling
them batch by batch, configured as its loop configures them, gives the very same adversarial examples. What depends on
the order of the sub-attacks (``fab-t`` leaves one restart to a ``fab`` that follows) is kept by configuring one object
through the whole list in order, also through the part that an earlier process has done.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calfat_plugin.evaluators.base import PROBABILITIES
from calfat_plugin.maths.passes import passed

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.interfaces import EvaluationTask
    from calfat_plugin.threat import ThreatModel

VERSIONS: Mapping[str, tuple[str, ...]] = {
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "plus": ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"),
    "rand": ("apgd-ce", "apgd-dlr"),
}
NAMES = VERSIONS["plus"]
TARGETED = ("apgd-t", "fab-t")
PUBLISHED = {"iterations": 100, "queries": 5000, "targets": 9}

_LEAST_CLASSES = {"apgd-dlr": 3, "apgd-t": 4}  # the losses look at the third and the fourth largest logit
_SQUARE_LEAST_HEIGHT = 5  # in L2 and L1 its first perturbation is a 5x5 tiling
_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


def playable(
    names: Sequence[str], threat: ThreatModel, num_classes: int, image_height: int
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Which sub-attacks can run at all: (names in order, the others with the reason, as part of a sentence).

    A reason has no semicolon, which separates findings in ``rounds.csv``.
    """
    reasons = {}
    for name in names:
        if threat.eps == 0:
            reasons[name] = "nothing can be changed within eps 0"
        elif num_classes < _LEAST_CLASSES.get(name, 2):
            reasons[name] = f"its loss needs {_LEAST_CLASSES[name]} classes, and there are {num_classes}"
        elif name == "square" and threat.norm != "linf" and image_height < _SQUARE_LEAST_HEIGHT:
            norm = _NORMS[threat.norm]
            least = f"{_SQUARE_LEAST_HEIGHT} pixels a side"
            reasons[name] = f"in {norm} it needs images of {least}, and these have {image_height}"
    return tuple(name for name in names if name not in reasons), reasons


class SubAttacks:
    """One configured ``pyautoattack.AutoAttack``, driven sub-attack by sub-attack.

    ``settings`` are as results record them; their seed is taken anew for every batch. ``on_call`` is called with the
    number of calls of the model since the last batch began.
    """

    def __init__(
        self, task: EvaluationTask, threat: ThreatModel, settings: Mapping[str, Any], on_call: Callable[[int], None]
    ) -> None:
        from pyautoattack import AutoAttack

        self.log = WarningLog()
        self._task = task
        self._on_call = on_call
        self._settings = settings
        self._calls = 0
        sub_attacks = None  # those of the version
        if settings["version"] == "custom":
            sub_attacks = settings["sub_attacks"]
        ensemble = AutoAttack(
            self._forward,
            attacks=sub_attacks,
            version=settings["version"],
            eps=float(threat.eps),
            norm=_NORMS[threat.norm],
            seed=settings["seed"],
            device=task.device,
        )
        ensemble.apgd.logger = ensemble.apgd_targeted.logger = self.log
        for attack in (ensemble.apgd_targeted, ensemble.fab):  # in L1 the first has fewer than the published
            attack.n_target_classes = min(attack.n_target_classes, settings["target_classes"])
        for attack in (ensemble.apgd, ensemble.apgd_targeted, ensemble.fab):
            attack.n_iter = attack.n_iter_orig = settings["iterations"]  # in L1 APGD splits the latter over radii
        ensemble.square.n_queries = settings["queries"]
        self._ensemble = ensemble
        self._current: Any = None

    def _forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        self._on_call(self._calls)
        return passed(self._task.model, x, self._task.rows_at_once)

    def configure(self, name: str) -> None:
        """Make ``name`` the current sub-attack; call this for every sub-attack of the list, in order."""
        ensemble = self._ensemble
        if name in ("apgd-ce", "apgd-dlr"):
            ensemble.apgd.loss = name.removeprefix("apgd-")
            self._current = ensemble.apgd
        elif name in ("fab", "fab-t"):
            ensemble.fab.targeted = name == "fab-t"
            if ensemble.fab.targeted:
                ensemble.fab.n_restarts = 1
            self._current = ensemble.fab
        elif name == "apgd-t":
            self._current = ensemble.apgd_targeted
        else:
            self._current = ensemble.square

    def perturb(self, x: Tensor, y: Tensor) -> Tensor:
        """Adversarial examples of the current sub-attack; x itself, (N, C, H, W), where it found none."""
        # Also taken by pyautoattack from its global stream; the caller keeps that stream out of everything else.
        self._current.seed = self._settings["seed"]
        self._calls = 0
        x_adv: Tensor = self._current.perturb(x, y)
        return x_adv

    @property
    def restarts(self) -> int:
        """Random restarts of the current sub-attack."""
        return int(self._current.n_restarts)

    def forward_passes(self, name: str) -> int:
        """About how often the current sub-attack, called ``name``, calls the model in one batch; for progress."""
        attack = self._current
        iterations = self._settings["iterations"]
        if name == "square":
            return int(attack.n_queries) + 3
        targets = 1
        if name in TARGETED:
            targets = attack.n_target_classes
        if name in ("fab", "fab-t"):
            return int(1 + targets * attack.n_restarts * (3 + 2 * iterations))
        return int(1 + targets * attack.n_restarts * (1 + (iterations + 1) * attack.eot_iter))

    def check_model(self, x: Tensor, y: Tensor) -> list[dict[str, str]]:
        """pyautoattack's checks on a first batch, as findings: code and text."""
        from pyautoattack import checks

        findings = []
        if self._settings["version"] != "rand":
            checks.check_randomized(self._forward, x, y, bs=len(x), logger=self.log)
            if self.log.take():
                findings.append(RANDOMISED)
        checks.check_range_output(self._forward, x, logger=self.log)
        if self.log.take():
            findings.append(PROBABILITIES)
        # The last check counts calls in a module's global that it never resets, and removes any tracer (a debugger).
        tracer = sys.gettrace()
        checks.funcs.update(dict.fromkeys(checks.funcs, 0))
        try:
            checks.check_dynamic(self._forward, x, False, logger=self.log)
        finally:
            sys.settrace(tracer)
        if self.log.take():
            findings.append(DYNAMIC)
        return findings

    def check_square(self, accuracies: Mapping[str, float]) -> list[dict[str, str]]:
        """pyautoattack's check after Square: ``clean`` and each sub-attack to the accuracy after it."""
        from pyautoattack import checks

        checks.check_square_sr(dict(accuracies), logger=self.log)
        if self.log.take():
            return [SQUARE]
        return []


class WarningLog:
    """Takes the place of pyautoattack's logger and remembers its warnings."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def warning(self, message: str) -> None:
        """Called by pyautoattack."""
        self._messages.append(message)

    def take(self) -> list[str]:
        """The messages since the last call."""
        messages = self._messages
        self._messages = []
        return messages

    def zero_gradients(self) -> int:
        """Like :meth:`take`, for warnings of APGD about points with zero gradient: their number."""
        points = 0
        for message in self.take():
            match = re.search(r"there are (\d+) points", message)
            if match is None:
                points += 1
            else:
                points += int(match[1])
        return points


def finding(code: str, text: str) -> dict[str, str]:
    """An entry of ``EvaluationResult.details["warnings"]``: a code for programs and a text for people."""
    return {"code": code, "text": text}


RANDOMISED = finding(
    "randomised",
    "the model answers differently each time it is asked about the same images: it is randomised. Attacks that "
    "believe one gradient are then too weak; use autoattack with version: rand.",
)
DYNAMIC = finding(
    "dynamic",
    "the model takes gradients while it predicts (a defence that optimises at test time). AutoAttack does not "
    "follow those, so its accuracy may be too high; an adaptive attack is needed.",
)
SQUARE = finding(
    "square-helps",
    "Square, which uses no gradients, broke examples that all gradient attacks before it left standing: the "
    "gradients are masked. Try Square with more queries, or an adaptive attack.",
)
