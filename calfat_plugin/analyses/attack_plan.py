"""What ``calfat attack`` was asked to do, checked before anything slow is imported.

A run's own recipe, or one made up for a model of the user's own, takes the command line's wishes as overrides. So the
recipe parser checks them, and its errors name the flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from calfat_plugin.errors import OptionError, RunError, did_you_mean
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import Document, read_document
from calfat_plugin.registry import Registry
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.threat import exact_text, parse_number

NATURAL = "natural"
LAST = "last"
_DEFAULT_RATIO = Fraction(1, 4)  # step_size over eps where the recipe gives none: 2/255 at 8/255
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Wishes:
    """The command line, apart from which model to attack.

    Attributes:
        attacks: evaluators, each ``NAME`` or ``LABEL=NAME``.
        settings: ``LABEL.OPTION=VALUE`` texts.
        eps: budgets as texts; empty: the recipe's.
        norm: or None for the recipe's.
        step_size: as text; None: as long in relation to eps as in the recipe.
        examples: how many test examples, or None for all.
        batch_size: or None for the recipe's.
        seed: or None for the recipe's.
        device: ``cpu``, ``cuda`` or ``cuda:N``; None: as the recipe says.
        data_dir: where data sets are; None: as the recipe says.
        download: whether a missing data set may be fetched.
    """

    attacks: tuple[str, ...]
    settings: tuple[str, ...] = ()
    eps: tuple[str, ...] = ()
    norm: str | None = None
    step_size: str | None = None
    examples: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    device: str | None = None
    data_dir: str | None = None
    download: bool = False


@dataclass(frozen=True)
class Subject:
    """The model to attack.

    Attributes:
        weights: a checkpoint of a run, or a state dict.
        run: the run's directory; None for a model of the user's own.
    """

    weights: Path
    run: Path | None


@dataclass(frozen=True)
class Plan:
    """Everything resolved, nothing loaded.

    Attributes:
        subject: which weights.
        experiments: one for each eps, ascending; they differ in the threat model alone.
        examples: how many test examples, or None for all.
        device: ``cpu``, ``cuda``, ``cuda:N``; None: as the recipe says.
    """

    subject: Subject
    experiments: tuple[Experiment, ...]
    examples: int | None
    device: str | None


def plan_run(target: Path, checkpoint: str | None, wishes: Wishes) -> Plan:
    """Attack a checkpoint of a run.

    Args:
        target: a run directory, or one of its checkpoints.
        checkpoint: ``last``, ``best-natural`` or ``best-robust`` of a run directory; None: ``last``.
        wishes: the rest of the command line.

    Raises:
        RunError: there is no such checkpoint, or it belongs to no run.
        RecipeError: a wish does not fit, or the run's recipe cannot be read.
    """
    subject = _find_checkpoint(target, checkpoint)
    assert subject.run is not None
    return _plan(subject, read_document(RunDirectory(subject.run).recipe), wishes)


def plan_model(model: str, weights: Path, dataset: str, wishes: Wishes) -> Plan:
    """Attack a model of the user's own.

    Args:
        model: ``package.module:factory``, or the name of a model that a recipe can name.
        weights: its state dict: a safetensors file, or what ``torch.save`` wrote.
        dataset: name of a data set.
        wishes: the rest of the command line.

    Raises:
        RunError: there is no such file.
        RecipeError: a name is unknown or a wish does not fit.
    """
    if not weights.is_file():
        raise RunError(f"--weights {weights}: no such file.{_near(weights)}")
    document = Document("calfat attack", {}, {})
    for path, value, place in (
        (("data_args", "dataset"), dataset, f"--dataset {dataset}"),
        (("model_args", "model"), model, f"--model {model}"),
        (("device_args", "using_gpu"), True, "calfat attack"),
        (("calfat", "trainer"), "standard", "calfat attack"),  # changes no model
    ):
        document = document.with_value(path, value, place)
    return _plan(Subject(weights, None), document, wishes)


def _plan(subject: Subject, document: Document, wishes: Wishes) -> Plan:
    if wishes.device is not None and not _DEVICE.fullmatch(wishes.device):
        raise OptionError(f"--device {wishes.device}: expected cpu, cuda, or cuda:N such as cuda:0.")
    if wishes.norm is not None and not wishes.eps:
        raise OptionError(f"--norm {wishes.norm} needs --eps beside it; the same eps is another budget in each norm.")
    registry = Registry.load()
    document = _with_attacks(document, wishes)
    for path, value, flag in (
        (("calfat", "evaluation", "batch_size"), wishes.batch_size, "--batch-size"),
        (("common_args", "random_seed"), wishes.seed, "--seed"),
        (("data_args", "data_cache_dir"), wishes.data_dir, "--data-dir"),
        (("calfat", "dataset", "download"), wishes.download or None, "--download"),
        (("calfat", "threat", "norm"), wishes.norm, "--norm"),
    ):
        if value is not None:
            document = document.with_value(path, value, f"{flag} {value}" if value is not True else flag)
    if not wishes.eps:
        experiments: tuple[Experiment, ...] = (assemble(_with_step(document, wishes.step_size), registry),)
    else:
        ratio = _ratio(document)
        budgets = sorted({_number("--eps", text): text for text in wishes.eps}.items())
        experiments = tuple(
            assemble(_with_budget(document, eps, text, wishes.step_size, ratio), registry) for eps, text in budgets
        )
    return Plan(subject, experiments, wishes.examples, wishes.device)


# --- which model ------------------------------------------------------------------------------------------------------


def _find_checkpoint(target: Path, checkpoint: str | None) -> Subject:
    if target.is_dir():
        run = RunDirectory(target)
        if not run.recipe.is_file():
            raise RunError(f"{target}: there is no run here (no recipe.yaml). Give a run directory or a checkpoint.")
        found = run.checkpoint(checkpoint or LAST)
        if not found.is_file():
            there = sorted(path.stem for path in found.parent.glob("*.safetensors"))
            if not there:
                raise RunError(f"{target}: this run has no checkpoint yet; it has not finished a round.")
            hint = did_you_mean(checkpoint or LAST, there)
            raise RunError(f"{found}: no such checkpoint.{hint} There are: {', '.join(there)}.")
        return Subject(found, target)
    if checkpoint is not None:
        raise OptionError(f"--checkpoint {checkpoint}: {target} is a checkpoint already; leave one of the two out.")
    if not target.is_file():
        raise RunError(f"{target}: no such checkpoint or run directory.{_near(target)}")
    run_path = target.resolve().parent.parent
    if not RunDirectory(run_path).recipe.is_file():
        raise RunError(
            f"{target}: this file lies in no run directory, so nothing says what model it is of. Give the model: "
            f"--model package.module:factory --weights {target} --dataset NAME."
        )
    shown = target.parent.parent
    return Subject(target, shown if RunDirectory(shown).recipe.is_file() else run_path)


def _near(path: Path) -> str:
    there = [str(child) for child in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(str(path), there)


# --- which attacks ----------------------------------------------------------------------------------------------------


def _with_attacks(document: Document, wishes: Wishes) -> Document:
    """The attacks as the recipe's evaluators, with ``natural`` among them."""
    place = f"--attacks {','.join(wishes.attacks)}"
    named = _labelled(wishes.attacks, place)
    choices: list[dict[str, Any]] = [
        {"name": name, **({} if label == name else {"label": label})} for label, name in named.items()
    ]
    places: dict[tuple[str | int, ...], str] = {}
    for setting in wishes.settings:
        position, option, value = _setting(setting, tuple(named))
        choices[position][option] = value
        places["calfat", "evaluators", position, option] = f"--set {setting}"
    document = document.with_value(("calfat", "evaluators"), choices, place)
    document.places.update(places)
    return document


def _labelled(attacks: Iterable[str], place: str) -> dict[str, str]:
    """Label to name, in order; ``natural`` at the end unless it is there already."""
    named: dict[str, str] = {}
    for attack in attacks:
        label, equals, name = (part.strip() for part in attack.partition("="))
        name = name if equals else label
        if not name or not _LABEL.fullmatch(label):
            raise OptionError(
                f"{place}: expected names such as fgsm,pgd20,autoattack, or LABEL=NAME to have one twice."
            )
        if label in named:
            raise OptionError(f"{place}: '{label}' stands there twice; name one of them: again={name}.")
        named[label] = name
    return named if NATURAL in named.values() else {**named, NATURAL: NATURAL}


def _setting(setting: str, labels: Sequence[str]) -> tuple[int, str, object]:
    """(position of the attack, option, value) of ``LABEL.OPTION=VALUE``."""
    key, equals, text = setting.partition("=")
    label, dot, option = key.strip().rpartition(".")
    if not (equals and dot and label and option):
        raise OptionError(f"--set {setting}: expected LABEL.OPTION=VALUE, such as pgd20.restarts=5.")
    if label not in labels:
        hint = did_you_mean(label, labels) or f" There are: {', '.join(labels)}."
        raise OptionError(f"--set {setting}: --attacks names no '{label}'.{hint}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise OptionError(f"--set {setting}: the value is not valid YAML; quote it for the shell.") from None
    if option in ("name", "label"):
        raise OptionError(f"--set {setting}: write LABEL=NAME in --attacks.")
    return labels.index(label), option, value


# --- which budgets ----------------------------------------------------------------------------------------------------


def _number(flag: str, text: str) -> Fraction:
    try:
        return parse_number(text)
    except ValueError as error:
        raise OptionError(f"{flag} {text}: {error}.") from None


def _ratio(document: Document) -> Fraction:
    """The recipe's step_size in relation to its eps."""
    threat = document.get(("calfat", "threat"))
    values = threat if isinstance(threat, Mapping) else {}
    try:
        eps, step_size = parse_number(values.get("eps")), parse_number(values.get("step_size"))
    except ValueError:
        return _DEFAULT_RATIO
    return step_size / eps if eps > 0 and step_size > 0 else _DEFAULT_RATIO


def _with_budget(document: Document, eps: Fraction, text: str, step_size: str | None, ratio: Fraction) -> Document:
    document = document.with_value(("calfat", "threat", "eps"), exact_text(eps), f"--eps {text}")
    if step_size is None and eps > 0:
        return document.with_value(("calfat", "threat", "step_size"), exact_text(eps * ratio), f"--eps {text}")
    return _with_step(document, step_size)


def _with_step(document: Document, step_size: str | None) -> Document:
    if step_size is None:
        return document
    value = exact_text(_number("--step-size", step_size))
    return document.with_value(("calfat", "threat", "step_size"), value, f"--step-size {step_size}")
