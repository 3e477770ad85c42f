"""``calfat per-class``: methods compared client by client and class by class (methods.md 12.1; the paper, section 5.2).

From one trained global model every client trains one local epoch with each method, nothing is aggregated, and every
local model is measured on the whole test split, class by class.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from calfat_plugin import __version__
from calfat_plugin.disk import TRY_AGAIN, refuse_unwritable, reserved, write_text
from calfat_plugin.errors import OptionError, UpdateError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.interfaces.training import AWPOptions
from calfat_plugin.options import describe
from calfat_plugin.recipe.clients import CLIENTS
from calfat_plugin.report.charts import mean_of
from calfat_plugin.report.reading import PER_CLASS
from calfat_plugin.results import RESULTS_FORMAT
from calfat_plugin.runs.loaded_run import IN_THE_RUN, LoadedRun, Trust, Warn, distrust, loaded_run, set_up_task

if TYPE_CHECKING:
    from calfat_plugin.datasets import ImageData

#: Options of methods whose own part sets in at a later round, each with the value that lets it set in at once.
_STARTS = {"start_round": 1, "pnc_warmup": 0}


def parse_picks(text: str, switch: str) -> list[Any]:
    """``calfat,{name: fedgairat, lam: -1}`` as a list of what recipes write.

    Raises:
        OptionError: it is no list of names or mappings.
    """
    try:
        picks = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        picks = None
    if not picks or not all(isinstance(pick, str) or (isinstance(pick, dict) and "name" in pick) for pick in picks):
        raise OptionError(
            f"{switch} {text}: expected names with commas between them, such as calfat,fedgairat; options go as in "
            "recipes: {name: fedgairat, lam: -1}."
        )
    return list(picks)


def compare_per_class(
    directory: Path,
    *,
    methods: Sequence[Any],
    evaluators: Sequence[Any],
    checkpoint: str,
    say: Callable[[str], None],
    warn: Warn,
    plugins: Iterable[Path] = (),
    trust: Trust = distrust,
) -> dict[str, Any]:
    """Run the protocol and write ``per_class.json`` into the run directory; an earlier one is kept as ``per_class-1``.

    Args:
        methods: local trainers as recipes write them, also with a label. The run's own method keeps its options when
            named plainly; schedules that start at a later round count as started.

    Returns:
        What was written; accuracies are fractions, None for a class without test examples.
    """
    from calfat_plugin.federation.worker import shards_of

    started = time.perf_counter()
    with loaded_run(directory, checkpoint, warn, plugins=plugins, trust=trust) as run:
        refuse_unwritable(directory, IN_THE_RUN)
        variants = _variants(run, methods, evaluators)
        for variant in variants.values():
            run.model(variant)  # refuses what cannot start from these weights before anything is trained
        shards = shards_of(run.experiment, run.dataset, run.device)
        found = {name: list(_clients(run, name, variant, shards, say)) for name, variant in variants.items()}
        content = {
            "format": RESULTS_FORMAT,
            "protocol": "one local epoch of each method from one global model, no aggregation, whole test split",
            "checkpoint": checkpoint,
            "round": run.checkpoint[0].round,
            "class_names": list(run.dataset.class_names),
            "evaluators": [pick.label for pick in next(iter(variants.values())).evaluators],
            "trainers": {name: variant.as_run()["calfat"]["trainer"] for name, variant in variants.items()},
            "threat": run.experiment.as_run()["calfat"]["threat"],
            "methods": found,
            "seconds": time.perf_counter() - started,
            "calfat_plugin": __version__,
        }
    path = directory / PER_CLASS
    if path.exists():
        earlier = reserved(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
        path.replace(earlier)
        say(f"earlier results: {earlier}")
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n", TRY_AGAIN)
    return content


def _variants(run: LoadedRun, methods: Sequence[Any], evaluators: Sequence[Any]) -> dict[str, Experiment]:
    """Label to the run's recipe with another trainer, one local epoch and plain averaging.

    All clients are honest and train by that trainer, at the recipe's learning rate: the run is over, and so is its
    schedule, which may have ended at 0.
    """
    own = run.experiment
    variants: dict[str, Experiment] = {}
    for method in methods:
        written = own.as_run()["calfat"]["trainer"] if method == own.trainer.name else method
        label, place = None, "--methods"
        if isinstance(method, Mapping) and (label := method.get("label")) is not None:  # a recipe's trainer has none
            if not isinstance(label, str) or not label.strip() or not label.isprintable():
                raise OptionError(f"{place}: label: got {describe(label)}, expected a name.")
            written = {key: value for key, value in method.items() if key != "label"}
        document = (
            own.document.with_value(("calfat", "trainer"), written, place)
            .with_value(("calfat", "aggregator"), "fedavg", place)
            .with_value(("calfat", "evaluators"), list(evaluators), "--evaluators")
            .with_value(CLIENTS, None, place)
        )
        one_epoch = {"epochs": 1, "local_steps": None, "lr_schedule": "constant", "warmup_rounds": 0}
        for key, value in one_epoch.items():
            document = document.with_value(("train_args", key), value, place)
        variant = assemble(document, own.registry)
        label = label or variant.trainer.label
        if label in variants:
            raise OptionError(f"--methods: '{label}' is named twice; give one of them a label of its own.")
        additions = dataclasses.replace(variant.additions, awp=_started(variant.additions.awp))
        trainer = dataclasses.replace(variant.trainer, options=_started(variant.trainer.options), additions=additions)
        variants[label] = dataclasses.replace(variant, trainer=trainer)
    return variants


def _started(options: Any) -> Any:
    """The same in full effect: the global model is a trained one, whatever its round."""
    starts = {**_STARTS, **({"warmup": 0} if isinstance(options, AWPOptions) else {})}
    found = {name: value for name, value in starts.items() if hasattr(options, name)}
    return dataclasses.replace(options, **found) if found else options


def _clients(
    run: LoadedRun, name: str, variant: Experiment, shards: Mapping[int, ImageData], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """What each client's local model can do."""
    from calfat_plugin.evaluators.measure import measure
    from calfat_plugin.federation.wire import pack_downlink, unpack_update
    from calfat_plugin.federation.worker import Worker
    from calfat_plugin.observer import RunObserver

    snapshot, _ = run.checkpoint
    worker = Worker(variant, run.dataset, shards, run.device, RunObserver())
    own, method = run.experiment, variant.trainer.entry.name
    # What the server and a client kept belongs to the method of the run, and of the client's group.
    groups = own.client_groups(run.dataset.train.y.numpy())
    downlink = pack_downlink(snapshot.global_state, snapshot.broadcast if own.trainer.entry.name == method else {})
    model = run.model(variant)
    test = run.dataset.test.to(run.device)
    evaluators = variant.ready_evaluators(variant.evaluators, set_up_task(run))
    for client in shards:
        of_method = own.trained_by(groups.get(client)).trainer.entry.name == method
        # One at a time: there may be thousands.
        worker.client_states = {client: snapshot.client_states.get(client, {}) if of_method else {}}
        try:
            update = unpack_update(worker.fit(client, snapshot.round + 1, downlink), worker.num_examples(client))
        except UpdateError as error:
            raise UpdateError(f"{name}: client {client} has no model to measure: {error}") from None
        model.load_state_dict(dict(update.state))
        results = measure(
            model.eval(),
            test,
            evaluators,
            num_classes=run.dataset.num_classes,
            threat=variant.threat,
            batch_size=variant.evaluation.batch_size,
            device=run.device,
            seed=variant.seed,
        )
        per_class = {label: list(result.per_class) for label, result in results.items()}
        means = {label: mean_of(values) or 0.0 for label, values in per_class.items()}
        say(f"{name}, client {client}: " + ", ".join(f"{label} {100 * mean:.2f} %" for label, mean in means.items()))
        yield {"client": client, "num_examples": worker.num_examples(client), **per_class}
