"""What ``calfat attack`` was asked to do, checked before anything slow is imported.

A run's own recipe, or one made up for a model of the user's own, takes the command line's request as overrides. So the
recipe parser checks it, and its errors name the flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from calfat_plugin.analyses.loaded_run import find_checkpoint, near
from calfat_plugin.errors import OptionError, RunError, did_you_mean
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import Document, read_document
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import check_device
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.threat import exact_text, parse_number

NATURAL = "natural"
DEFAULT_RATIO = Fraction(1, 4)  # step_size over eps where the recipe gives none: 2/255 at 8/255
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class AttackRequest:
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
        plugins: files with plugins, beside those of the recipe.
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
    plugins: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything resolved, nothing loaded.

    Attributes:
        weights: a checkpoint of a run, or a state dict.
        run: the run's directory; None for a model of the user's own.
        experiments: one for each eps, ascending; they differ in the threat model alone.
        request: what of the command line the experiments do not say: the number of examples, and the device.
    """

    weights: Path
    run: Path | None
    experiments: tuple[Experiment, ...]
    request: AttackRequest


def plan_run(target: Path, checkpoint: str | None, request: AttackRequest) -> Plan:
    """Attack a checkpoint of a run.

    Args:
        target: a run directory, or one of its checkpoints.
        checkpoint: ``last``, ``best-natural`` or ``best-robust`` of a run directory; None: ``last``.
        request: the rest of the command line.

    Raises:
        RunError: there is no such checkpoint, or it belongs to no run.
        RecipeError: the request does not fit, or the run's recipe cannot be read.
    """
    weights, run = find_checkpoint(target, checkpoint)
    return _plan(weights, run, read_document(RunDirectory(run).recipe), request)


def plan_model(model: str, weights: Path, dataset: str, request: AttackRequest) -> Plan:
    """Attack a model of the user's own.

    Args:
        model: ``package.module:factory``, or the name of a model that a recipe can name.
        weights: its state dict: a safetensors file, or what ``torch.save`` wrote.
        dataset: name of a data set.
        request: the rest of the command line.

    Raises:
        RunError: there is no such file.
        RecipeError: a name is unknown or the request does not fit.
    """
    if not weights.is_file():
        raise RunError(f"--weights {weights}: no such file.{near(weights)}")
    document = Document("calfat attack", {}, {})
    for path, value, place in (
        (("data_args", "dataset"), dataset, f"--dataset {dataset}"),
        (("model_args", "model"), model, f"--model {model}"),
        (("device_args", "using_gpu"), True, "calfat attack"),
        (("calfat", "trainer"), "standard", "calfat attack"),  # changes no model
    ):
        document = document.with_value(path, value, place)
    return _plan(weights, None, document, request)


def _plan(weights: Path, run: Path | None, document: Document, request: AttackRequest) -> Plan:
    if request.device is not None:
        check_device(request.device, "--device")
    if request.norm is not None and not request.eps:
        raise OptionError(f"--norm {request.norm} needs --eps beside it; the same eps is another budget in each norm.")
    document = with_plugins(_with_attacks(document, request), request.plugins)
    registry = Registry.for_recipe(document)
    for path, value, flag in (
        (("calfat", "evaluation", "batch_size"), request.batch_size, "--batch-size"),
        (("common_args", "random_seed"), request.seed, "--seed"),
        (("data_args", "data_cache_dir"), request.data_dir, "--data-dir"),
        (("calfat", "dataset", "download"), request.download or None, "--download"),
        (("calfat", "threat", "norm"), request.norm, "--norm"),
    ):
        if value is not None:
            document = document.with_value(path, value, f"{flag} {value}" if value is not True else flag)
    budgets = sorted({_number("--eps", text): text for text in request.eps}.items())
    documents = [_with_budget(document, eps, text, request.step_size) for eps, text in budgets]
    documents = documents or [_with_step(document, request.step_size)]
    experiments = tuple(assemble(each, registry) for each in documents)
    return Plan(weights, run, experiments, request)


# --- which attacks ----------------------------------------------------------------------------------------------------


def _with_attacks(document: Document, request: AttackRequest) -> Document:
    """The attacks as the recipe's evaluators, with ``natural`` among them."""
    place = f"--attacks {','.join(request.attacks)}"
    named = _labelled(request.attacks, place)
    choices: list[dict[str, Any]] = [
        {"name": name, **({} if label == name else {"label": label})} for label, name in named.items()
    ]
    places: dict[tuple[str | int, ...], str] = {}
    for setting in request.settings:
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
            raise OptionError(f"{place}: '{label}' is named twice; name one of them: again={name}.")
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
        return DEFAULT_RATIO
    return step_size / eps if eps > 0 and step_size > 0 else DEFAULT_RATIO


def _with_budget(document: Document, eps: Fraction, text: str, step_size: str | None) -> Document:
    length = eps * _ratio(document)
    document = document.with_value(("calfat", "threat", "eps"), exact_text(eps), f"--eps {text}")
    if step_size is None and eps > 0:
        return document.with_value(("calfat", "threat", "step_size"), exact_text(length), f"--eps {text}")
    return _with_step(document, step_size)


def _with_step(document: Document, step_size: str | None) -> Document:
    if step_size is None:
        return document
    value = exact_text(_number("--step-size", step_size))
    return document.with_value(("calfat", "threat", "step_size"), value, f"--step-size {step_size}")
