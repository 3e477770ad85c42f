"""What ``calfat attack`` was asked to do, checked before anything slow is imported.

A run's own recipe, or one made up for a model of the user's own, takes the command line's request as overrides. So the
recipe parser checks it, and its errors name the flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calfat_plugin.errors import OptionError, RunError, did_you_mean
from calfat_plugin.exact import QUARTER, Number, StepSize, exact_text, parse_number
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.experiment.resolve import recipe_of_own_model
from calfat_plugin.recipe.document import EPS, NORM, Document, KeyPath, parsed_value
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.registry import Registry
from calfat_plugin.results import NATURAL
from calfat_plugin.runs.loaded_run import Trust, distrust, find_checkpoint, near, recipe_of
from calfat_plugin.runs.request import check_device
from calfat_plugin.threat import ThreatModel

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class AttackRequest:
    """The command line, but for the run to attack; None: what the recipe says."""

    attacks: tuple[str, ...]  # evaluators, each ``NAME`` or ``LABEL=NAME``
    settings: tuple[str, ...] = ()  # ``LABEL.OPTION=VALUE``
    eps: tuple[str, ...] = ()  # budgets as texts; empty: the recipe's
    norm: str | None = None
    step_size: str | None = None  # as text; None in another norm than the recipe's: ``eps/4``
    examples: int | None = None  # None: all
    batch_size: int | None = None
    seed: int | None = None
    device: str | None = None
    data_dir: str | None = None
    download: bool = False  # whether a missing data set may be fetched
    plugins: tuple[Path, ...] = ()  # files beside those of the recipe
    trust: Trust = distrust  # is asked about each plugin file of the run that this user has not run before
    checkpoint: str | None = None  # which one of a run directory; None: the last
    model: str | None = None  # of the user's own, a name or ``package.module:factory``, with the next two
    weights: Path | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class AttackPlan:
    """Everything resolved, nothing loaded."""

    weights: Path  # a checkpoint of a run, or a state dict
    run: Path | None  # None: a model of the user's own
    experiments: tuple[Experiment, ...]  # one for each eps, ascending; they differ in the threat model alone
    request: AttackRequest


def planned(target: Path | None = None, **request: Any) -> AttackPlan:
    """Attack what the command line names: ``target``, a checkpoint or a run directory, or a model of the user's own.

    Args:
        request: the fields of an :class:`AttackRequest`.
    """
    asked = AttackRequest(**request)
    own_model = {"--model": asked.model, "--weights": asked.weights, "--dataset": asked.dataset}
    if target is not None:
        for flag, value in own_model.items():
            if value is not None:
                raise OptionError(
                    f"{flag}: the recipe of a run says what its model and data are. Give {target}, or --model with "
                    "--weights and --dataset, not both."
                )
        file, run = find_checkpoint(target, asked.checkpoint)
        return _plan(file, run, recipe_of(run, asked.plugins, asked.trust), asked)
    if asked.model is None or asked.weights is None or asked.dataset is None:
        missing = ", ".join(flag for flag, value in own_model.items() if value is None)
        raise OptionError(
            "there is nothing to attack. Give a run directory or a checkpoint, or a model of your own with "
            f"--model, --weights and --dataset (missing: {missing})."
        )
    if asked.checkpoint is not None:
        raise OptionError(
            f"--checkpoint {asked.checkpoint}: names one of a run directory; leave it out beside --model."
        )
    if not asked.weights.is_file():
        raise RunError(f"--weights {asked.weights}: no such file.{near(asked.weights)}")
    document = recipe_of_own_model(
        "calfat attack",
        [
            (("data_args", "dataset"), asked.dataset, f"--dataset {asked.dataset}"),
            (("model_args", "model"), asked.model, f"--model {asked.model}"),
            (("device_args", "using_gpu"), True, "calfat attack"),
        ],
    )
    return _plan(asked.weights, None, with_plugins(document, asked.plugins), asked)


def _plan(weights: Path, run: Path | None, document: Document, request: AttackRequest) -> AttackPlan:
    """The recipe with all that the command line changes, resolved once for each eps."""
    if request.device is not None:
        check_device(request.device, "--device")
    step_size = request.step_size
    if step_size is not None:
        step_size = _number(StepSize, "--step-size", step_size).text
    step_place = f"--step-size {request.step_size}"
    norm_of_recipe = document.get(NORM) or ThreatModel.norm
    if request.norm not in (None, norm_of_recipe) and step_size is None:
        # The recipe's step is a length in its own norm.
        step_size = QUARTER.text
        step_place = f"--norm {request.norm}"
    document = _with_attacks(document, request)
    registry = Registry.for_recipe(document)
    document = document.with_values(_changes(request))
    if step_size is not None:
        document = document.with_value(("calfat", "threat", "step_size"), step_size, step_place)
    documents = _with_each_eps(document, request.eps)
    experiments = tuple(assemble(document_of_eps, registry, trains=False) for document_of_eps in documents)
    return AttackPlan(weights, run, experiments, request)


def _changes(request: AttackRequest) -> list[tuple[KeyPath, Any, str]]:
    """Keys that the command line sets, each with its value and its flag."""
    changes: list[tuple[KeyPath, Any, str]] = []
    for path, value, flag in (
        (("calfat", "evaluation", "batch_size"), request.batch_size, "--batch-size"),
        (("common_args", "random_seed"), request.seed, "--seed"),
        (("data_args", "data_cache_dir"), request.data_dir, "--data-dir"),
        (NORM, request.norm, "--norm"),
    ):
        if value is not None:
            changes.append((path, value, f"{flag} {value}"))
    if request.download:
        changes.append((("calfat", "dataset", "download"), True, "--download"))
    return changes


def _with_each_eps(document: Document, texts: Sequence[str]) -> list[Document]:
    """The recipe at each eps, ascending; as it is where the command line has none."""
    text_of_eps = {_number(parse_number, "--eps", text): text for text in texts}
    if not text_of_eps:
        return [document]
    documents = []
    for eps in sorted(text_of_eps):
        documents.append(document.with_value(EPS, exact_text(eps), f"--eps {text_of_eps[eps]}"))
    return documents


# --- which attacks ----------------------------------------------------------------------------------------------------


def _with_attacks(document: Document, request: AttackRequest) -> Document:
    """The attacks as the recipe's evaluators, with ``natural`` among them."""
    place = f"--attacks {','.join(request.attacks)}"
    name_of_label: dict[str, str] = {}
    for attack in request.attacks:
        label, equals, name = (part.strip() for part in attack.partition("="))
        if not equals:
            name = label
        if not name or not _LABEL.fullmatch(label):
            raise OptionError(
                f"{place}: expected names such as fgsm,pgd20,autoattack, or LABEL=NAME to have one twice."
            )
        if label in name_of_label:
            raise OptionError(f"{place}: '{label}' is named twice; name one of them: again={name}.")
        name_of_label[label] = name
    if NATURAL not in name_of_label.values():
        name_of_label[NATURAL] = NATURAL
    choices: list[dict[str, Any]] = []
    for label, name in name_of_label.items():
        choice: dict[str, Any] = {"name": name}
        if label != name:
            choice["label"] = label
        choices.append(choice)
    places: dict[KeyPath, str] = {}
    for setting in request.settings:
        position, option, value = _setting(setting, tuple(name_of_label))
        choices[position][option] = value
        places["calfat", "evaluators", position, option] = f"--set {setting}"
    document = document.with_value(("calfat", "evaluators"), choices, place)
    document.places.update(places)
    return document


def _setting(setting: str, labels: Sequence[str]) -> tuple[int, str, object]:
    """(position of the attack, option, value) of ``LABEL.OPTION=VALUE``."""
    key, equals, text = setting.partition("=")
    label, dot, option = key.strip().rpartition(".")
    if not (equals and dot and label and option):
        raise OptionError(f"--set {setting}: expected LABEL.OPTION=VALUE, such as pgd20.restarts=5.")
    if label not in labels:
        hint = did_you_mean(label, labels) or f" There are: {', '.join(labels)}."
        raise OptionError(f"--set {setting}: --attacks names no '{label}'.{hint}")
    if option in ("name", "label"):
        raise OptionError(f"--set {setting}: write LABEL=NAME in --attacks.")
    return labels.index(label), option, parsed_value(text, (option,), f"--set {setting}")


def _number(read: Callable[[object], Number], flag: str, text: str) -> Number:
    try:
        return read(text)
    except ValueError as error:
        raise OptionError(f"{flag} {text}: {error}.") from None
