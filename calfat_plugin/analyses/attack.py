"""Attack a finished model: load the weights, measure at every eps, write the results beside them."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin import __version__
from calfat_plugin.analyses.attack_plan import NATURAL, Plan
from calfat_plugin.errors import ModelError, OptionError, RunError, UpdateError
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import exact_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from calfat_plugin.datasets import Dataset
    from calfat_plugin.entries import Citation, Entry
    from calfat_plugin.experiment import Experiment

_NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights
_PARALLEL = "module."  # what DataParallel puts in front of every name


@dataclass(frozen=True)
class Outcome:
    """What was measured.

    Attributes:
        results: natural accuracy first, then every attack at every eps, ascending.
        alarms: findings about them.
        path: the results file.
        curves: the files with the accuracy over eps; empty for a single eps.
    """

    results: tuple[EvaluationResult, ...]
    alarms: tuple[Alarm, ...]
    path: Path
    curves: tuple[Path, ...]


class Listener:
    """Hears of an attack's progress; this one ignores everything."""

    def warn(self, message: str) -> None:
        """A finding that does not stop anything."""

    def progress(self, name: str, done: int, total: int, correct: int) -> None:
        """During an evaluation: its name with the eps, examples done, in all, and correct so far."""

    def measured(self, result: EvaluationResult) -> None:
        """After an evaluation."""


def attack(plan: Plan, command: list[str], listener: Listener, output: Path | None = None) -> Outcome:
    """Measure and write.

    What AutoAttack has done so far is kept beside the results until they are written: the same call goes on there.

    Args:
        plan: what to do.
        command: the command line, for the record.
        listener: is informed of progress.
        output: results file; None: ``attacks/`` of the run, or beside the weights, under a name that is free.

    Raises:
        CalfatError: with what to fix.
    """
    started = time.perf_counter()
    first = plan.experiments[0]
    folder, stem = _place(plan, output)
    device = _device(plan, listener)
    with _threads(first.recipe.runtime.threads):
        from calfat_plugin.runs.environment import describe_environment

        dataset = first.load_dataset()
        model, facts = _load(plan, first, dataset)
        scratch = folder / f".{stem}-unfinished"
        results = _measure(plan, dataset, model.to(device).eval(), device, scratch, listener)
        content = {
            **facts,
            "dataset": dataset.name,
            "test_examples": len(dataset.test),
            "evaluations": results,
            "environment": describe_environment(device, first.registry, command),
        }
    alarms = find_alarms(results)
    candidates = _names(folder, stem) if output is None else (output,)
    path = _write(plan, content, alarms, candidates, time.perf_counter() - started)
    shutil.rmtree(scratch, ignore_errors=True)  # only now is it of no use
    curves: tuple[Path, ...] = ()
    if len(plan.experiments) > 1:
        from calfat_plugin.analyses.attack_curve import draw

        curves = draw(results, path)
    return Outcome(results, alarms, path, curves)


def _measure(
    plan: Plan, dataset: Dataset, model: nn.Module, device: torch.device, scratch: Path, listener: Listener
) -> tuple[EvaluationResult, ...]:
    from calfat_plugin.evaluators.budget import subset
    from calfat_plugin.evaluators.measure import clean_correct, measure

    data = subset(dataset.test, plan.examples).to(device)
    results: list[EvaluationResult] = []
    correct: Tensor | None = None
    for experiment in plan.experiments:
        recipe = experiment.recipe
        batch_size, eps = recipe.evaluation.batch_size, exact_text(recipe.threat.eps)
        if correct is None:
            correct = clean_correct(model, data, num_classes=dataset.num_classes, batch_size=batch_size, device=device)
        for pick in sorted(experiment.evaluators, key=lambda pick: pick.name != NATURAL):
            if pick.name == NATURAL and results:
                continue  # the same at every eps
            name = pick.label if pick.name == NATURAL else f"{pick.label} at eps {eps}"
            found = measure(
                model,
                data,
                experiment.build_evaluators((pick,)),
                num_classes=dataset.num_classes,
                threat=recipe.threat,
                batch_size=batch_size,
                device=device,
                seed=experiment.seed,
                correct=correct,
                scratch=scratch,
                on_progress=lambda label, done, total, right, name=name: listener.progress(name, done, total, right),  # type: ignore[misc]
            )
            results += found.values()
            listener.measured(results[-1])
    return tuple(results)


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(plan: Plan, experiment: Experiment, dataset: Dataset) -> tuple[nn.Module, dict[str, Any]]:
    """The model with its weights, on the CPU, and what to say about it in the results."""
    from calfat_plugin.maths.averaging import check_update

    weights, run = plan.subject.weights, plan.subject.run
    model = experiment.build_model(dataset, experiment.build_trainer())
    if run is not None:
        from calfat_plugin.runs.checkpoints import load_checkpoint

        snapshot, notes = load_checkpoint(weights)
        state: Mapping[str, Any] = snapshot.global_state
        facts = {
            "run": str(run),
            "checkpoint": str(weights),
            "round": snapshot.round,
            "selected_on": notes.get("selected_on"),
            "trainer": experiment.trainer.name,
            "aggregator": experiment.aggregator.name,
        }
    else:
        state = _read_weights(weights)
        facts = {"weights": str(weights)}
    try:
        check_update(state, dict(model.state_dict()), who="the file")
    except UpdateError as error:
        raise ModelError(f"{weights}: these are not weights of the model '{experiment.model.name}': {error}.") from None
    model.load_state_dict(dict(state))
    return model, {**facts, "model": experiment.model.name, "seed": experiment.seed}


def _read_weights(path: Path) -> Mapping[str, Any]:
    """A state dict without running any code that the file may hold.

    Raises:
        RunError: it is no state dict.
    """
    import torch
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            content: Any = {name: tensor for name, tensor in load_file(path).items() if "/" not in name}
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may fail in any way; torch's text would advise to trust the file
        raise RunError(
            f"{path}: the weights cannot be read ({type(error).__name__}). Expected a safetensors file, or a state "
            "dict written by torch.save that holds tensors and nothing else."
        ) from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise RunError(f"{path}: holds a {type(content).__name__}; expected a state dict, tensors by name.")
    parallel = all(isinstance(name, str) and name.startswith(_PARALLEL) for name in content)
    return {name.removeprefix(_PARALLEL) if parallel else name: tensor for name, tensor in content.items()}


def _device(plan: Plan, listener: Listener) -> torch.device:
    import torch

    gpu = plan.experiments[0].recipe.device
    wanted = plan.device
    if wanted is None:
        if not (gpu.using_gpu and torch.cuda.is_available()):
            if gpu.using_gpu and plan.subject.run is not None:
                listener.warn("the recipe asks for a GPU, but torch sees none here; attacking on the CPU.")
            return torch.device("cpu")
        wanted = f"cuda:{gpu.gpu_id}"
    device = torch.device(wanted)
    if device.type == "cuda":
        seen = torch.cuda.device_count()
        if (device.index or 0) >= seen:
            raise OptionError(f"--device {wanted}: torch sees {seen} GPU{'' if seen == 1 else 's'} here.")
    return device


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    """The recipe's number of threads for a while: some arithmetic depends on it in the last bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- writing ----------------------------------------------------------------------------------------------------------


def _place(plan: Plan, output: Path | None) -> tuple[Path, str]:
    """(folder, name without ending) of the results; made and tried now, not after hours of work."""
    weights, run = plan.subject.weights, plan.subject.run
    if output is not None:
        if output.exists():
            raise RunError(f"--output {output}: this file exists already; results are never overwritten.")
        folder, stem = output.parent, output.stem
    elif run is not None:
        folder, stem = run / "attacks", weights.stem
    else:
        folder, stem = weights.parent, f"{weights.stem}-attacks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{stem}-trial"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written to ({error.strerror}); choose another place with --output."
        ) from None
    return folder, stem


def _write(
    plan: Plan, content: Mapping[str, Any], alarms: tuple[Alarm, ...], candidates: Iterable[Path], seconds: float
) -> Path:
    from calfat_plugin.runs.directory import RunDirectory
    from calfat_plugin.runs.writer import CONVENTIONS, evaluation_as_json

    path = _reserved(candidates)
    RunDirectory(path.parent).write_json(
        path,
        {
            **content,
            "seconds": seconds,
            "conventions": CONVENTIONS,
            "evaluations": [evaluation_as_json(evaluation) for evaluation in content["evaluations"]],
            "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
            "calfat_plugin": __version__,
            "citations": [dataclasses.asdict(citation) for citation in _citations(plan)],
        },
    )
    return path


def _citations(plan: Plan) -> tuple[Citation, ...]:
    """What is owed; of a model of the user's own, the attacks and the data alone."""
    experiment = plan.experiments[0]
    if plan.subject.run is not None:
        return experiment.citations()
    entries: tuple[Entry, ...] = (experiment.dataset.entry, *(pick.entry for pick in experiment.evaluators))
    return tuple({entry.citation: None for entry in entries if entry.citation is not None})


def _names(folder: Path, stem: str) -> Iterator[Path]:
    yield folder / f"{stem}.json"
    for number in count(2):
        yield folder / f"{stem}-{number}.json"


def _reserved(candidates: Iterable[Path]) -> Path:
    """The first that did not exist, created empty, so that two commands never take the same."""
    for path in candidates:
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}).") from None
        found: Path = path
        return found
    raise RunError(f"{path}: this file exists already; results are never overwritten.")
