"""Recipes and settings in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from calfat_plugin.recipe.silo import UNPROTECTED
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.reading import RunFiles

_SECRET = re.compile(r"(?i)((?:key|token|secret|password|passwd|credential)[\w.-]*=)\S+")


def listing(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def plain(value: Any) -> str:
    """A recipe value as a recipe writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(pick, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_words(name: str, value: str) -> str:
    """An option in a name or a heading: ``ε 0.1``, ``learning rate 0.05``."""
    return f"{'ε' if name == 'eps' else name.replace('_', ' ')} {value}"


def pick(value: Any) -> str:
    """A plugin with its options, as a recipe picks it: ``calfat (scale 10, prior counts)``."""
    if not isinstance(value, Mapping):
        return plain(value)
    return str(value.get("name")) + _options({key: value[key] for key in value if key not in ("name", "loss")})


def method(run: RunFiles) -> str:
    """The local trainer, with the loss modifier when it is not the plain one: ``fedpgd + calibrated``."""
    trainer = run.value("calfat", "trainer")
    name = str(trainer.get("name")) if isinstance(trainer, Mapping) else plain(trainer)
    loss = run.value("calfat", "trainer", "loss", "name")
    return name if loss in (None, "plain") else f"{name} + {loss}"


def aggregator(run: RunFiles) -> str:
    """The aggregator's name."""
    return str(run.value("calfat", "aggregator", "name"))


def partition(run: RunFiles) -> str:
    """How the data was split: ``dirichlet, β = 0.1``."""
    name = plain(run.value("data_args", "partition_method"))
    return f"{name}, β = {plain(run.value('data_args', 'partition_alpha'))}" if "dirichlet" in name else name


def headline(run: RunFiles) -> str:
    """The run in a sentence."""
    clients = counted(int(run.value("train_args", "client_num_in_total") or 0), "client")
    return (
        f"{method(run)} with {aggregator(run)} on {run.value('data_args', 'dataset')} ({partition(run)}): "
        f"{clients}, {counted(run.num_rounds, 'round')}, seed {run.seed}"
    )


def highlights(run: RunFiles) -> dict[str, str]:
    """What was run: term to value."""
    train = run.value("train_args") or {}
    total, per_round = train.get("client_num_in_total"), train.get("client_num_per_round")
    loss, threat = run.value("calfat", "trainer", "loss"), run.value("calfat", "threat") or {}
    found = {
        "Method": pick(run.value("calfat", "trainer")),
        "Loss modifier": pick(loss) if loss and method(run) != loss.get("name") else "",
        "Aggregator": pick(run.value("calfat", "aggregator")),
        "Data set": plain(run.value("data_args", "dataset")),
        "Partition": f"{partition(run)}{_options(run.value('calfat', 'partition'))}",
        "Model": f"{plain(run.value('model_args', 'model'))}{_options(run.value('calfat', 'model'))}",
        "Clients": f"{total}, {'all' if per_round in (None, total) else per_round} in each round",
        "Rounds": f"{run.num_rounds}, {_work(train)}, batches of {train.get('batch_size')}",
        f"Local {_kind(train)}": _optimizer(train),
        "Threat": f"{threat.get('norm')}, ε = {plain(threat.get('eps'))}, {threat.get('steps')} training steps of "
        f"{plain(threat.get('step_size')).replace('eps', 'ε')}",
        "Seed": str(run.seed),
        "Security": UNPROTECTED if _is_unprotected(run) else "",
    }
    return {term: value for term, value in found.items() if value}


def _work(train: Mapping[str, Any]) -> str:
    """What a client does in a round."""
    steps = train.get("local_steps")
    return f"local epochs {train.get('epochs')}" if steps is None else f"local steps {plain(steps)}"


def _optimizer(train: Mapping[str, Any]) -> str:
    """Settings of the local optimiser that are in force; recipes of earlier versions lack some keys."""
    courses = {
        "step": f"times {plain(train.get('lr_decay_rate'))} every {plain(train.get('lr_step_size'))} rounds",
        "cosine": f"cosine to {plain(train.get('learning_rate_min'))}",
    }
    warmup, norm = train.get("warmup_rounds"), train.get("max_grad_norm")
    course = [f"warm-up rounds {plain(warmup)}" if warmup else "", courses.get(str(train.get("lr_schedule")), "")]
    rate = f"learning rate {plain(train.get('learning_rate'))}"
    momentum = f"momentum {plain(train.get('momentum'))}{' (Nesterov)' if train.get('nesterov') else ''}"
    parts = [
        f"{rate} ({', '.join(filter(None, course))})" if any(course) else rate,
        momentum if _kind(train) == "SGD" else "",
        f"weight decay {plain(train.get('weight_decay'))}",
        "" if norm is None else f"gradients clipped to norm {plain(norm)}",
    ]
    return ", ".join(filter(None, parts))


def _kind(train: Mapping[str, Any]) -> str:
    """The local optimiser's name."""
    return {"adam": "Adam", "adamw": "AdamW"}.get(str(train.get("client_optimizer")), "SGD")


def _is_unprotected(run: RunFiles) -> bool:
    """As ``host.runtimes`` decides it, from the recipe as run."""
    proofs = {"GRPC": ("tls",), "MQTT_S3": ("tls", "mqtt.username")}.get(run.value("comm_args", "backend"), ())
    across = run.value("common_args", "training_type") == "cross_silo"
    return across and bool(proofs) and not any(run.value("calfat", "silo", *proof.split(".")) for proof in proofs)


def _options(value: Any) -> str:
    shown = [f"{key} {plain(item)}" for key, item in (value or {}).items() if item is not None]
    return f" ({', '.join(shown)})" if shown else ""


def command(run: RunFiles) -> str:
    """The command line, with what may be a secret blotted out."""
    return " ".join(_SECRET.sub(r"\1…", str(word)) for word in run.environment.get("command") or ())


def budget(settings: Mapping[str, Any]) -> str:
    """The ball that an attack kept to: ``linf, ε = 8/255``; empty without one."""
    return f"{settings['norm']}, ε = {plain(settings['eps'])}" if "norm" in settings and "eps" in settings else ""
