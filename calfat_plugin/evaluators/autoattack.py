"""AutoAttack (Croce and Hein 2020), by its official implementation, resumable after every batch."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.datasets.data import pixels
from calfat_plugin.disk import LARGEST_JSON, TRY_AGAIN, read_whole, write_text
from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import OptionError, did_you_mean, listed
from calfat_plugin.evaluators import subattacks
from calfat_plugin.evaluators.base import (
    BudgetOptions,
    budget_as_json,
    check_budget,
    counts_of,
    finite,
    narrowed,
    refuse_training_mode,
    share,
)
from calfat_plugin.evaluators.subattacks import PUBLISHED, SubAttacks, finding
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.options import option
from calfat_plugin.results import NOT_RUN, EvaluationResult
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from calfat_plugin.recipe.schema import Recipe

log = logging.getLogger(__name__)

_FORMAT = "calfat-attack-1"
_BITS = ("robust", "attacked")
_LEAST_L1 = 5  # iterations; APGD in L1 begins at larger radii, and fewer would leave none for eps itself
_COUNTING = (
    "AutoAttack attacks what is classified correctly, and counts an example as broken once any sub-attack has broken it"
)


@dataclass(frozen=True)
class SubAttackOptions(BudgetOptions):
    """Options of a single sub-attack; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    seed: int | None = option(None, low=0, high=2**63 - 1, help="handed to pyautoattack; null: the run's seed")
    iterations: int = option(
        PUBLISHED["iterations"], low=1, help="of APGD and FAB; fewer than 100 are a weaker attack than published"
    )
    queries: int = option(
        PUBLISHED["queries"], low=1, help="of Square; fewer than 5000 are a weaker attack than published"
    )


@dataclass(frozen=True)
class AutoAttackOptions(SubAttackOptions):
    """Options of AutoAttack; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    version: Literal["standard", "plus", "rand", "custom"] = option(
        "standard", help="standard: the one that papers report; rand: for randomised models; custom: see attacks"
    )
    attacks: str | None = option(
        None,
        help="with version custom: sub-attacks in order, such as apgd-ce, square (restarts as pyautoattack's custom); "
        "null: those of the version",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.version == "custom") != (self.attacks is not None):
            raise OptionError(
                "version: custom and attacks: go together; attacks lists sub-attacks, such as 'apgd-ce, square'. "
                f"Known: {listed(subattacks.NAMES)}."
            )
        for name in self.names:
            if name not in subattacks.NAMES:
                hint = did_you_mean(name, subattacks.NAMES) or f" Known: {listed(subattacks.NAMES)}."
                raise OptionError(f"attacks: AutoAttack has no sub-attack '{name}'.{hint}")
            if self.names.count(name) > 1:
                raise OptionError(f"attacks: '{name}' is listed twice; it would repeat itself exactly.")

    @property
    def names(self) -> tuple[str, ...]:
        """The sub-attacks, in order."""
        if self.attacks is None:
            return subattacks.VERSIONS[self.version]
        return tuple(name.strip() for name in self.attacks.split(","))


class AutoAttack(Evaluator):
    """The ensemble of parameter-free attacks; each one works on what those before it have not broken."""

    gives_examples = True  # those that broke something

    def __init__(self, options: AutoAttackOptions) -> None:
        self.options = options

    @classmethod
    def of_one(cls, name: str, options: SubAttackOptions) -> AutoAttack:
        """A single sub-attack."""
        values = {item.name: getattr(options, item.name) for item in dataclasses.fields(options)}
        return cls(AutoAttackOptions(**values, version="custom", attacks=name))

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Attack; continue from what an earlier, interrupted call left in ``task.scratch``."""
        import torch

        refuse_training_mode(task.model)
        task = narrowed(task, self.options)
        threat = self.options.threat(task.threat)
        names, left_out = subattacks.playable(self.options.names, threat, task.num_classes, task.data.x.shape[2])
        settings = self._settings(task, threat, names)
        implementation = f"pyautoattack {metadata.version('pyautoattack')}"
        # Within eps 0 nothing needs to run: the clean image is the only point, so clean accuracy is the number.
        if not names and threat.eps > 0:
            why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items()).removeprefix(f"{label}: ")
            return EvaluationResult.without_number(label, why, settings=settings, implementation=implementation)
        path = None
        digest = ""
        if task.scratch is not None:
            digest = fingerprint(task, {**settings, "by": implementation})
            path = task.scratch / f"autoattack-{digest[:16]}.json"  # the file holds the whole digest
        state = AttackState.load(path, digest, task.clean_correct)
        devices = range(0)
        if task.device.type == "cuda":
            devices = range(torch.cuda.device_count())
        # pyautoattack seeds torch's global streams and draws from them; leaving fork_rng gives them back as they were.
        with attack_mode(task.model), torch.no_grad(), torch.random.fork_rng(devices=devices):
            _Run(task, label, threat, settings, state, lambda: state.save(path, digest)).finish()
        details: dict[str, Any] = {"sub_attacks": state.finished}
        if left_out:
            details["not_run"] = left_out
        details["warnings"] = [*_warnings(settings, left_out, task.num_classes), *state.warnings]
        return EvaluationResult(
            **counts_of(task.data.y, task.clean_correct, state.robust, task.num_classes),
            label=label,
            settings=settings,
            implementation=implementation,
            seconds=state.seconds,
            details=details,
        )

    def _settings(self, task: EvaluationTask, threat: ThreatModel, names: tuple[str, ...]) -> dict[str, Any]:
        """For the result, and for ``SubAttacks``."""
        options = self.options
        seed = options.seed
        if seed is None:
            seed = task.seed
        return {
            **budget_as_json(threat),
            "attack": "autoattack",
            "version": options.version,
            "sub_attacks": list(names),
            "iterations": options.iterations,
            "queries": options.queries,
            "target_classes": min(PUBLISHED["targets"], task.num_classes - 1),
            "seed": seed,
            "batch_size": task.batch_size,
            "counting": _COUNTING,
        }


def _warnings(settings: Mapping[str, Any], left_out: Mapping[str, str], num_classes: int) -> Iterator[dict[str, str]]:
    """Findings that need no attack to be known."""
    differences = []
    for name in ("iterations", "queries"):
        if settings[name] != PUBLISHED[name]:
            differences.append(f"{settings[name]} {name} instead of {PUBLISHED[name]}")
    if differences:
        yield finding("not-published", f"{', '.join(differences)}: this is not the published attack.")
    if left_out:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        yield finding(NOT_RUN, f"some sub-attacks were left out, so this is not the published attack. {reasons}.")
    targets = settings["target_classes"]
    published = PUBLISHED["targets"]
    if targets < published and set(settings["sub_attacks"]) & set(subattacks.TARGETED):
        text = f"with {num_classes} classes the targeted sub-attacks aim at {targets} classes instead of {published}."
        yield finding("few-classes", text)


class _Run:
    """One evaluation on its way through sub-attacks and batches."""

    def __init__(
        self,
        task: EvaluationTask,
        label: str,
        threat: ThreatModel,
        settings: Mapping[str, Any],
        state: AttackState,
        save: Callable[[], None],
    ) -> None:
        self.task = task
        self.label = label
        self.threat = threat
        self.state = state
        self.save = save
        self.names: list[str] = settings["sub_attacks"]
        self.attacks = SubAttacks(task, threat, settings, self._on_call)
        self.started = time.perf_counter() - state.seconds
        self._batch_share = 0.0  # of the current sub-attack's work, one batch
        self._expected_calls = 1
        self._reported = -1

    def finish(self) -> None:
        """Do what is left."""
        if not self.names:
            return
        if self.state.position == 0 and self.state.batch == 0:
            x, y = self._images(slice(0, self.task.batch_size))
            self.state.warnings += self.attacks.check_model(x, y)
        for position, name in enumerate(self.names):
            self.attacks.configure(name)
            if position < self.state.position or not bool(self.state.attacked.any()):
                continue
            self._sub_attack(name)
        self._report(len(self.names), 0.0)

    def _sub_attack(self, name: str) -> None:
        """Work through the batches that are left: craft, check the budget again, judge, and note what is done."""
        state, task = self.state, self.task
        where = state.attacked.nonzero().squeeze(1)
        batches = where.split(task.batch_size)
        self._batch_share = 1 / len(batches)
        self._expected_calls = self.attacks.forward_passes(name)
        for batch in range(state.batch, len(batches)):
            part = batches[batch]
            x, y = self._images(part.to(task.data.x.device))
            x_adv = self.attacks.perturb(x, y)
            self.threat.check(x_adv, x, who=f"evaluator '{self.label}' ({name})")
            logits = finite(task.model(x_adv), f"images of '{self.label}' ({name})")
            broken = (logits.max(dim=1)[1] != y).cpu()
            state.robust[part[broken]] = False
            if broken.any():
                task.on_examples(part[broken], x_adv[broken.to(x_adv.device)])
            state.batch = batch + 1
            state.seconds = time.perf_counter() - self.started
            state.zero_gradients += self.attacks.log.zero_gradients()
            self.save()
            self._report(state.position, state.batch * self._batch_share)
        spent = time.perf_counter() - self.started - sum(row["seconds"] for row in state.finished)
        state.finished.append(
            {
                "name": name,
                "accuracy": share(state.robust),
                "attacked": len(where),
                "restarts": self.attacks.restarts,
                "seconds": spent,
            }
        )
        if name == self.names[-1]:
            state.warnings += self._last_warnings()
        state.position += 1
        state.batch = 0
        state.attacked = state.robust.clone()
        self.save()

    def _images(self, where: Tensor | slice) -> tuple[Tensor, Tensor]:
        data = self.task.data
        x = data.x[where].clone().to(self.task.device)
        y = data.y[where].clone().to(self.task.device)
        return pixels(x), y

    def _last_warnings(self) -> list[dict[str, str]]:
        """Findings that show only when everything has run."""
        warnings = []
        if self.state.zero_gradients:
            text = (
                f"{self.state.zero_gradients} starts of APGD's DLR loss had a gradient of exactly zero, from which "
                "gradient attacks cannot move. Trust Square more than the others here."
            )
            warnings.append(finding("zero-gradients", text))
        accuracies = {"clean": share(self.task.clean_correct)}
        for row in self.state.finished:
            accuracies[row["name"]] = row["accuracy"]
        return [*warnings, *self.attacks.check_square(accuracies)]

    def _on_call(self, calls: int) -> None:
        within = min(1.0, calls / self._expected_calls)
        self._report(self.state.position, (self.state.batch + within) * self._batch_share)

    def _report(self, position: int, share: float) -> None:
        """Progress in examples times sub-attacks; ``correct`` keeps the share that is still robust."""
        examples = len(self.state.robust)
        done = min(examples, int(share * examples)) + position * examples
        if done > self._reported:
            self._reported = done
            robust = int(self.state.robust.sum())
            self.task.on_progress(done, len(self.names) * examples, round(done * robust / examples))


@dataclass
class AttackState:
    """How far an attack made of sub-attacks has come; kept in a file, or nowhere where the task has no ``scratch``."""

    robust: Tensor  # (N,) bool on the CPU, examples that nothing has broken yet
    attacked: Tensor  # (N,) bool, those that were robust when the current sub-attack began; it works through them
    position: int = 0  # of the current sub-attack
    batch: int = 0  # its finished batches
    finished: list[dict[str, Any]] = field(default_factory=list)  # a row for each finished sub-attack
    warnings: list[dict[str, str]] = field(default_factory=list)
    zero_gradients: int = 0  # starts with a gradient of exactly zero
    seconds: float = 0.0  # in all processes together

    @classmethod
    def load(cls, path: Path | None, digest: str, clean_correct: Tensor) -> AttackState:
        """The state to continue from, or a fresh one in which the ``clean_correct`` examples are robust."""
        fresh = cls(robust=clean_correct.clone(), attacked=clean_correct.clone())
        if path is None or not path.exists():
            return fresh
        try:
            content = json.loads(read_whole(path, LARGEST_JSON).decode())
            if content.pop("format") != _FORMAT or content.pop("digest") != digest:
                raise ValueError("it is of another format, model, data or setting")
            for name in _BITS:
                content[name] = from_bits(content[name], len(clean_correct))
            state = cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s: cannot be used (%s); the attack starts again", path, error)
            return fresh
        log.info("%s: continuing after %d sub-attacks and %d batches", path, state.position, state.batch)
        return state

    def save(self, path: Path | None, digest: str) -> None:
        """Write atomically: after a crash there is the old state or the new one, never half of one."""
        if path is None:
            return
        bits = {name: as_bits(getattr(self, name)) for name in _BITS}
        text = json.dumps({"format": _FORMAT, "digest": digest, **vars(self), **bits}, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, TRY_AGAIN)


def fingerprint(task: EvaluationTask, settings: Mapping[str, Any]) -> str:
    """A digest of the model, the data and the settings: where one bit differs, no state is shared."""
    import torch  # here, not above: recipes are checked without torch

    from calfat_plugin.tensor_files import digest_of

    facts = [settings, torch.__version__, task.device.type, task.num_classes, repr(task.model)]
    tensors = {
        **dict(task.model.named_parameters()),
        **dict(task.model.named_buffers()),
        "x/": task.data.x,
        "y/": task.data.y,
        "clean_correct/": task.clean_correct,
    }
    return digest_of(tensors, facts)


def as_bits(verdicts: Tensor) -> str:
    """(N,) bool as a text of 0 and 1."""
    return "".join(str(int(verdict)) for verdict in verdicts.tolist())


def from_bits(text: str, count: int) -> Tensor:
    """The inverse of :func:`as_bits`, of so many verdicts."""
    import torch

    if len(text) != count or set(text) - {"0", "1"}:
        raise ValueError(f"{len(text)} verdicts for {count} examples")
    return torch.tensor([letter == "1" for letter in text], dtype=torch.bool)


def _check(options: AutoAttackOptions, recipe: Recipe) -> None:
    """Entry check of the whole: of what ``check_budget`` looks at, and of the iterations."""
    if options.threat(recipe.threat).norm == "l1" and options.version == "standard" and options.iterations < _LEAST_L1:
        raise OptionError(
            f"iterations: {options.iterations} are too few in l1, where APGD spends most of them on larger radii; take "
            f"{_LEAST_L1} or more."
        )


CROCE = paper("croce2020reliable")
# Name to summary and formula; z are logits of x', z^1 >= z^2 >= ... the same in order.
_ATTACKS = {
    "apgd-ce": ("APGD on the cross-entropy, five restarts", "x' = argmax CE(f(x'), y)"),
    "apgd-dlr": (
        "APGD on the difference of logits ratio, five restarts",
        "x' = argmax -(z_y - max_{k != y} z_k) / (z^1 - z^3)",
    ),
    "apgd-t": (
        "APGD on the targeted difference of logits ratio, nine targets",
        "x' = argmax -(z_y - z_t) / (z^1 - (z^3 + z^4) / 2), for each target t",
    ),
    "fab": (
        "FAB, the smallest change that crosses a boundary, five restarts",
        "x' = argmin ||x' - x|| with argmax f(x') != y",
    ),
    "fab-t": ("targeted FAB, nine targets", "x' = argmin ||x' - x|| with z_t >= z_y, for each target t"),
    "square": (
        "Square, a random search that needs no gradients, 5000 queries",
        "x' = argmin z_y - max_{k != y} z_k, by random squares of the image that are kept if they help",
    ),
}
_entry = partial(EvaluatorEntry, citation=CROCE, check=check_budget)
ENTRIES = [
    _entry(
        "autoattack",
        build=AutoAttack,
        config=AutoAttackOptions,
        check=_check,
        summary="AutoAttack by pyautoattack, the official implementation: the headline robustness",
        formula="argmax f(x') = y for the x' of apgd-ce, apgd-t, fab-t and square (version standard)",
    )
]
for name, (summary, formula) in _ATTACKS.items():
    sub_attack = _entry(
        name,
        build=partial(AutoAttack.of_one, name),
        config=SubAttackOptions,
        summary=f"AutoAttack's sub-attack alone: {summary}",
        formula=formula,
    )
    ENTRIES.append(sub_attack)
