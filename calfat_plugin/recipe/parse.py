"""Document to Recipe: structure, types and units. Knows no plugin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from calfat_plugin.errors import OptionError, RecipeError, did_you_mean, listed
from calfat_plugin.options import describe, quoting_hint
from calfat_plugin.recipe import schema, silo
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_keys import REFUSED_OPTIMIZERS
from calfat_plugin.recipe.host_sections import read_host_sections, refuse_misplaced
from calfat_plugin.recipe.plugin_files import plugin_files
from calfat_plugin.recipe.sections import options_at, section_at
from calfat_plugin.recipe.training import TrainArgs, check_training
from calfat_plugin.rounds_csv import SUFFIXES
from calfat_plugin.threat import ThreatModel, parse_number

DEFAULT_EVALUATORS = ("natural", "fgsm", "pgd20")
DEFAULT_MONITOR = ("natural", "pgd20")
_OTHER_COLUMN = re.compile(
    r"round|heterogeneity|clients|refused|alarms|bytes_(down|up)|seconds|peak_(gpu_)?memory_mb|learning_rate|(loss|update_norm|num_examples|weight)_[0-9]+"
)
_FOLDER = re.compile(r"[^/\\\x00-\x1f]+")  # what a folder may be called
_EXAMPLE = "such as {name: calfat, preset: release}"


def parse_recipe(document: Document) -> schema.Recipe:
    """Check structure, types and units of a whole recipe.

    Raises:
        RecipeError: with place, key path, what was found and what was wanted.
    """
    warnings: list[str] = []
    host, extra = read_host_sections(document, warnings)
    if "calfat" not in document.data:
        raise RecipeError(
            f"{document.file}: there is no section 'calfat'. The shortest recipe has two lines, "
            "model_args: {model: cnn_small} and calfat: {trainer: {name: calfat}}."
        )
    calfat = section_at(document, ("calfat",))
    for key in calfat:
        if key not in schema.CALFAT_KEYS:
            refuse_misplaced(document, ("calfat", key))
            hint = did_you_mean(key, schema.CALFAT_KEYS) or f" Known: {listed(schema.CALFAT_KEYS)}."
            raise document.error(("calfat", key), f"unknown key.{hint}")
    train: TrainArgs = host["train_args"]
    check_training(document, train, warnings)
    aggregator = _choice(document, ("calfat", "aggregator"), calfat.get("aggregator"), "fedavg")
    _check_optimizer(document, train, aggregator, warnings)
    monitor_raw = dict(section_at(document, ("calfat", "monitor")))
    monitored = monitor_raw.pop("evaluators", None)
    evaluators = _picks(document, ("calfat", "evaluators"), calfat.get("evaluators"), "evaluator", DEFAULT_EVALUATORS)
    return schema.Recipe(
        name=_name(document),
        document=document,
        common=host["common_args"],
        data=host["data_args"],
        model=host["model_args"],
        train=train,
        device=host["device_args"],
        comm=host["comm_args"],
        tracking=host["tracking_args"],
        host_extra=extra,
        trainer=_trainer(document),
        aggregator=aggregator,
        partition=_named_elsewhere(document, "partition", host["data_args"].partition_method),
        dataset=_named_elsewhere(document, "dataset", host["data_args"].dataset),
        model_choice=_named_elsewhere(document, "model", host["model_args"].model),
        threat=_threat(document),
        evaluators=evaluators,
        monitor=options_at(document, ("calfat", "monitor"), schema.MonitorOptions, monitor_raw, also=("evaluators",)),
        monitor_evaluators=_monitored(document, monitored),
        evaluation=options_at(document, ("calfat", "evaluation"), schema.EvaluationOptions),
        runtime=options_at(document, ("calfat", "runtime"), schema.RuntimeOptions),
        silo=_silo(document, train.client_num_in_total),
        loggers=_picks(document, ("calfat", "loggers"), calfat.get("loggers"), "logger"),
        plugins=plugin_files(document),
        reported=_reported(document, [choice.label for choice in evaluators], warnings),
        warnings=tuple(warnings),
    )


def _name(document: Document) -> str:
    """``calfat.name``, which becomes a folder's name, or the file's own."""
    path: KeyPath = ("calfat", "name")
    name = document.get(path)
    if name is None:
        return Path(document.file).stem
    if not isinstance(name, str) or name.strip(". ") == "" or not _FOLDER.fullmatch(name):
        raise document.error(
            path, f"got {describe(name)}, expected a name for the folder of its runs, such as calfat_digits."
        )
    return name


def _check_optimizer(document: Document, train: TrainArgs, aggregator: schema.Choice, warnings: list[str]) -> None:
    """Warn who expects the host's key to choose the aggregator; FedAvg is what every host recipe says."""
    asked = train.federated_optimizer
    path: KeyPath = ("train_args", "federated_optimizer")
    if asked.lower() in REFUSED_OPTIMIZERS:
        reason = REFUSED_OPTIMIZERS[asked.lower()]
        raise document.error(path, f"got '{asked}', but {reason}. Remove the key, or write FedAvg.")
    if asked.lower() not in ("fedavg", aggregator.name.lower()):
        warnings.append(
            f"{document.place(path)}: {dotted(path)}: '{asked}' has no effect; calfat.aggregator selects "
            f"the algorithm, here '{aggregator.name}'."
        )


def _choice(document: Document, path: KeyPath, value: Any, default: str | None = None) -> schema.Choice:
    """``name`` or ``{name: ..., preset: ..., options...}``, the value at ``path``."""
    if value is None and default is not None:
        return schema.Choice(default, {}, path, label=default)
    if isinstance(value, str):
        return schema.Choice(value, {}, path, label=value)
    if not isinstance(value, Mapping):
        hint = quoting_hint(value)
        raise document.error(path, f"got {describe(value)}, expected a name or a mapping {_EXAMPLE}.{hint}")
    texts = {key: value.get(key) for key in ("name", "preset", "label")}
    if "label" in value and isinstance(path[-1], str):  # not of a list
        raise document.error((*path, "label"), "only evaluators and loggers have a label; remove it.")
    for key, text in texts.items():
        if key != "name" if text is None else isinstance(text, str) and text.strip() and text.isprintable():
            continue
        if key in value:
            raise document.error((*path, key), f"got {describe(text)}, expected a name.{quoting_hint(text)}")
    name = texts["name"] or default
    if name is None:
        raise document.error(path, f"there is no 'name'; expected a mapping {_EXAMPLE}.")
    options = {key: item for key, item in value.items() if key not in texts}
    return schema.Choice(name, options, path, preset=texts["preset"], label=texts["label"] or name)


def _trainer(document: Document) -> schema.TrainerChoice:
    path: KeyPath = ("calfat", "trainer")
    choice = _choice(document, path, document.get(path), "calfat")
    options = dict(choice.options)
    raw = options.pop("loss", None)
    loss = None if raw is None else _choice(document, (*path, "loss"), raw)
    return schema.TrainerChoice(choice.name, options, path, preset=choice.preset, label=choice.label, loss=loss)


def _named_elsewhere(document: Document, key: str, name: str) -> schema.Choice:
    """Options in ``calfat.<key>`` for a name that a host section picks."""
    path: KeyPath = ("calfat", key)
    value = document.get(path)
    if isinstance(value, str) or (isinstance(value, Mapping) and "name" in value):
        where = {"dataset": "data_args.dataset", "model": "model_args.model"}.get(key, "data_args.partition_method")
        raise document.error(path, f"the {key} is set by {where}; only its options belong here.")
    return schema.Choice(name, dict(section_at(document, path)), path, label=name)


_LISTS = {"evaluator": "[natural, pgd20]", "logger": "[tensorboard]"}


def _picks(
    document: Document, path: KeyPath, raw: Any, kind: str, default: tuple[str, ...] = ()
) -> tuple[schema.Choice, ...]:
    """A list of plugins of one kind, each with a label of its own."""
    if raw is None:
        raw = list(default)
    if not isinstance(raw, list):
        raise document.error(path, f"got {describe(raw)}, expected a list such as {_LISTS[kind]}.")
    choices = {}
    for index, item in enumerate(raw):
        choice = _choice(document, (*path, index), item)
        if choice.label in choices:
            raise document.error(
                choice.path, f"the {kind} '{choice.label}' is listed twice; remove one, or give it its own 'label'."
            )
        choices[choice.label] = choice
    return tuple(choices.values())


def _monitored(document: Document, raw: Any) -> tuple[schema.Choice, ...]:
    """The evaluators of the monitor, whose labels become columns of ``rounds.csv``."""
    choices = _picks(document, ("calfat", "monitor", "evaluators"), raw, "evaluator", DEFAULT_MONITOR)
    labels = {choice.label for choice in choices}
    for choice in choices:
        taken = "of every run" if _OTHER_COLUMN.fullmatch(choice.label) else ""
        for owner in {choice.label.removesuffix(suffix) for suffix in SUFFIXES} & labels - {choice.label}:
            taken = f"of '{owner}'"
        if taken:
            raise document.error(
                choice.path,
                f"the label '{choice.label}' is the name of a column {taken} in rounds.csv; give it another 'label'.",
            )
    return choices


def _reported(document: Document, labels: list[str], warnings: list[str]) -> schema.Reported:
    """``{source: text, <label>: percent ...}``; a label that is nearly one of this recipe's draws a warning.

    Numbers for other evaluators draw none: one may well run fewer than the paper.
    """
    path: KeyPath = ("calfat", "reported")
    raw = dict(section_at(document, path))
    source = raw.pop("source", "")
    if not isinstance(source, str):
        raise document.error((*path, "source"), f"got {describe(source)}, expected a text.")
    percent = {}
    for label, value in raw.items():
        try:
            percent[label] = float(parse_number(value))
        except (ValueError, OverflowError):
            percent[label] = -1.0
        if not 0 <= percent[label] <= 100:
            raise document.error(
                (*path, label), f"got {describe(value)}, expected an accuracy in percent, 0 to 100, as in the source."
            )
        near = did_you_mean(label, labels)
        if label not in labels and near:
            where = f"{document.place((*path, label))}: calfat.reported.{label}"
            warnings.append(f"{where}: no evaluator of this recipe has that label.{near}")
    return schema.Reported(source, percent)


def _threat(document: Document) -> ThreatModel:
    path: KeyPath = ("calfat", "threat")
    options = options_at(document, path, schema.ThreatOptions)
    given: list[tuple[str, Fraction, str]] = [("eps", options.eps, "8/255")]
    if options.step_size.factor is None:
        given.append(("step_size", options.step_size, "eps/4 or 2/255"))
    for key, length, example in given:
        if options.norm == "linf" and length > 1:
            found = describe(document.get((*path, key)))
            raise document.error(
                (*path, key),
                f"got {found}, expected a fraction of the pixel range such as {example} (pixels lie in [0, 1]).",
            )
    try:
        return ThreatModel(options.norm, options.eps, options.step_size, options.steps)  # type: ignore[arg-type]
    except OptionError as error:
        raise document.error(path, f"{error}.") from None


def _silo(document: Document, num_clients: int) -> silo.Silo:
    path: KeyPath = ("calfat", "silo")
    below = ("parties", "tls", "mqtt", "s3")
    raw = {key: value for key, value in section_at(document, path).items() if key not in below}

    def failing_below(key: str) -> Callable[[KeyPath, str], RecipeError]:
        return lambda rest, complaint: document.error((*path, key, *rest), complaint)

    parties = silo.parse_parties(document.get((*path, "parties")), num_clients, failing_below("parties"))
    has_tls = document.get((*path, "tls")) is not None
    tls = options_at(document, (*path, "tls"), silo.TLSSettings) if has_tls else None
    mqtt = options_at(document, (*path, "mqtt"), silo.MQTTSettings)
    s3 = options_at(document, (*path, "s3"), silo.S3Settings)
    silo.check_mqtt(mqtt, failing_below("mqtt"))
    silo.check_s3(s3, failing_below("s3"))
    settings = options_at(document, path, silo.SiloSettings, raw, also=below)
    if settings.min_clients is not None and settings.min_clients > num_clients:
        raise document.error(
            (*path, "min_clients"),
            f"got {settings.min_clients}, but there are only {num_clients} clients (train_args.client_num_in_total).",
        )
    return silo.Silo(settings, parties, tls, mqtt, s3)
