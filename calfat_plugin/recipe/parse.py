"""Document to Recipe: structure, types and units. Knows no plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from calfat_plugin.errors import RecipeError, did_you_mean, listed
from calfat_plugin.options import describe, describe_options, parse_options
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.host_keys import HOST_KEYS
from calfat_plugin.recipe.silo import Silo, SiloSettings, TLSSettings, parse_parties
from calfat_plugin.threat import ThreatModel

T = TypeVar("T")

CALFAT_KEYS = (
    "trainer",
    "aggregator",
    "threat",
    "evaluators",
    "monitor",
    "partition",
    "dataset",
    "model",
    "evaluation",
    "runtime",
    "silo",
)
_OTHER_HOST_SECTIONS = (
    "validation_args",
    "environment_args",
    "attack_args",
    "defense_args",
    "dp_args",
    "client_specific_args",
    "fhe_args",
)
DEFAULT_EVALUATORS = ("natural", "fgsm", "pgd20")
DEFAULT_MONITOR = ("natural", "pgd20")
_EXAMPLE = "such as {name: calfat, preset: release}"


def parse_recipe(document: Document) -> schema.Recipe:
    """Check structure, types and units of a whole recipe.

    Raises:
        RecipeError: with place, key path, what was found and what was wanted.
    """
    if "calfat" not in document.data:
        hint = did_you_mean("calfat", [key for key in document.data if key.startswith("cal")])
        raise RecipeError(
            f"{document.file}: there is no section 'calfat'.{hint} "
            "The shortest is calfat: {trainer: {name: calfat}}."
        )
    warnings: list[str] = []
    host = {name: _host_section(document, name, warnings) for name in schema.HOST_SECTIONS}
    extra = _other_sections(document, warnings)
    extra.update({name: section[1] for name, section in host.items() if section[1]})
    calfat = _section(document, ("calfat",))
    for key in calfat:
        if key not in CALFAT_KEYS:
            hint = did_you_mean(key, CALFAT_KEYS) or f" Known: {listed(CALFAT_KEYS)}."
            raise document.error(("calfat", key), f"unknown key.{hint}")
    train: schema.TrainArgs = host["train_args"][0]
    _check_clients(document, train)
    monitor_raw = dict(_section(document, ("calfat", "monitor")))
    monitored = monitor_raw.pop("evaluators", None)
    return schema.Recipe(
        name=Path(document.file).stem,
        document=document,
        common=host["common_args"][0],
        data=host["data_args"][0],
        model=host["model_args"][0],
        train=train,
        device=host["device_args"][0],
        comm=host["comm_args"][0],
        tracking=host["tracking_args"][0],
        host_extra=extra,
        trainer=_trainer(document),
        aggregator=_choice(document, ("calfat", "aggregator"), default="fedavg"),
        partition=_named_elsewhere(document, "partition", host["data_args"][0].partition_method),
        dataset=_named_elsewhere(document, "dataset", host["data_args"][0].dataset),
        model_choice=_named_elsewhere(document, "model", host["model_args"][0].model),
        threat=_threat(document),
        evaluators=_evaluators(document, ("calfat", "evaluators"), calfat.get("evaluators"), DEFAULT_EVALUATORS),
        monitor=_options(document, ("calfat", "monitor"), schema.MonitorOptions, monitor_raw, also=("evaluators",)),
        monitor_evaluators=_evaluators(document, ("calfat", "monitor", "evaluators"), monitored, DEFAULT_MONITOR),
        evaluation=_options(document, ("calfat", "evaluation"), schema.EvaluationOptions),
        runtime=_options(document, ("calfat", "runtime"), schema.RuntimeOptions),
        silo=_silo(document, train.client_num_in_total),
        warnings=tuple(warnings),
    )


def failing_at(document: Document, path: KeyPath) -> Callable[[str | None, str], RecipeError]:
    """The ``fail`` argument of ``parse_options`` for options that stand below ``path``."""
    return lambda name, complaint: document.error(path if name is None else (*path, name), complaint)


def _section(document: Document, path: KeyPath) -> Mapping[str, Any]:
    value = document.get(path)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise document.error(path, f"got {describe(value)}, expected a section of keys and values.")
    return value


def _options(
    document: Document,
    path: KeyPath,
    config: type[T],
    raw: Mapping[str, Any] | None = None,
    also: tuple[str, ...] = (),
) -> T:
    raw = _section(document, path) if raw is None else raw
    owner = f"section '{path[-1]}'"
    return parse_options(config, raw, owner=owner, fail=failing_at(document, path), also=also)


def _host_section(document: Document, name: str, warnings: list[str]) -> tuple[Any, dict[str, Any]]:
    """The typed part of a host section, and the keys that are only passed on."""
    config = schema.HOST_SECTIONS[name]
    ours = {info.name for info in describe_options(config)}
    typed: dict[str, Any] = {}
    passed_on: dict[str, Any] = {}
    for key, value in _section(document, (name,)).items():
        (typed if key in ours else passed_on)[key] = value
        if key not in ours and key not in HOST_KEYS:
            hint = did_you_mean(key, ours) or did_you_mean(key, HOST_KEYS)
            warnings.append(
                f"{document.place((name, key))}: {name}.{key}: neither FedML nor calfat_plugin knows this key.{hint}"
            )
    return _options(document, (name,), config, typed), passed_on


def _other_sections(document: Document, warnings: list[str]) -> dict[str, dict[str, Any]]:
    others = {}
    known = (*schema.HOST_SECTIONS, *_OTHER_HOST_SECTIONS, "calfat")
    for name in document.data:
        if name in schema.HOST_SECTIONS or name == "calfat":
            continue
        others[name] = dict(_section(document, (name,)))
        if name not in _OTHER_HOST_SECTIONS:
            warnings.append(
                f"{document.place((name,))}: {name}: not a section of FedML or calfat_plugin."
                f"{did_you_mean(name, known)}"
            )
    return others


def _check_clients(document: Document, train: schema.TrainArgs) -> None:
    if (train.client_num_per_round or 0) > train.client_num_in_total:
        raise document.error(
            ("train_args", "client_num_per_round"),
            f"got {train.client_num_per_round} clients per round, but there are only {train.client_num_in_total} in "
            "total (train_args.client_num_in_total).",
        )


def _choice(document: Document, path: KeyPath, default: str | None = None) -> schema.Choice:
    """``name`` or ``{name: ..., preset: ..., options...}`` at ``path``."""
    return _as_choice(document, path, document.get(path), default)


def _as_choice(document: Document, path: KeyPath, value: Any, default: str | None) -> schema.Choice:
    if value is None and default is not None:
        return schema.Choice(default, {}, path, label=default)
    if isinstance(value, str):
        return schema.Choice(value, {}, path, label=value)
    if not isinstance(value, Mapping):
        raise document.error(path, f"got {describe(value)}, expected a name or a mapping {_EXAMPLE}.")
    texts = {}
    for key in ("name", "preset", "label"):
        text = value.get(key)
        if text is not None and not isinstance(text, str):
            raise document.error((*path, key), f"got {describe(text)}, expected a text.")
        texts[key] = text
    name = texts["name"] or default
    if name is None:
        raise document.error(path, f"there is no 'name'; expected a mapping {_EXAMPLE}.")
    options = {key: item for key, item in value.items() if key not in texts}
    return schema.Choice(name, options, path, preset=texts["preset"], label=texts["label"] or name)


def _trainer(document: Document) -> schema.TrainerChoice:
    path: KeyPath = ("calfat", "trainer")
    choice = _as_choice(document, path, document.get(path), "calfat")
    options = dict(choice.options)
    loss = None
    if options.get("loss") is not None:
        loss = _as_choice(document, (*path, "loss"), options["loss"], None)
    options.pop("loss", None)
    return schema.TrainerChoice(choice.name, options, path, preset=choice.preset, label=choice.label, loss=loss)


def _named_elsewhere(document: Document, key: str, name: str) -> schema.Choice:
    """Options in ``calfat.<key>`` for a name that a host section picks."""
    path: KeyPath = ("calfat", key)
    return schema.Choice(name, dict(_section(document, path)), path, label=name)


def _evaluators(document: Document, path: KeyPath, raw: Any, default: tuple[str, ...]) -> tuple[schema.Choice, ...]:
    if raw is None:
        raw = list(default)
    if not isinstance(raw, list):
        raise document.error(path, f"got {describe(raw)}, expected a list such as [natural, pgd20].")
    choices = [_as_choice(document, (*path, index), item, None) for index, item in enumerate(raw)]
    seen: set[str] = set()
    for choice in choices:
        if choice.label in seen:
            raise document.error(
                choice.path,
                f"the evaluator '{choice.label}' stands here twice; remove one, or give it a 'label' of its own.",
            )
        seen.add(choice.label)
    return tuple(choices)


def _threat(document: Document) -> ThreatModel:
    path: KeyPath = ("calfat", "threat")
    options = _options(document, path, schema.ThreatOptions)
    for key, example in (("eps", "8/255"), ("step_size", "2/255")):
        if options.norm == "linf" and getattr(options, key) > 1:
            found = describe(document.get((*path, key)))
            raise document.error(
                (*path, key),
                f"got {found}, expected a fraction of the pixel range such as {example} (pixels lie in [0, 1]).",
            )
    return ThreatModel(options.norm, options.eps, options.step_size, options.steps)  # type: ignore[arg-type]


def _silo(document: Document, num_clients: int) -> Silo:
    path: KeyPath = ("calfat", "silo")
    raw = dict(_section(document, path))
    parties = parse_parties(
        raw.pop("parties", None),
        num_clients,
        lambda below, complaint: document.error((*path, "parties", *below), complaint),
    )
    tls = None
    if raw.pop("tls", None) is not None:
        tls = _options(document, (*path, "tls"), TLSSettings)
    settings = _options(document, path, SiloSettings, raw, also=("parties", "tls"))
    if settings.min_clients is not None and settings.min_clients > num_clients:
        raise document.error(
            (*path, "min_clients"),
            f"got {settings.min_clients}, but there are only {num_clients} clients (train_args.client_num_in_total).",
        )
    return Silo(settings, parties, tls)
