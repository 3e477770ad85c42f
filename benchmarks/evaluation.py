"""Evaluation: PGD-20 against the authors' code, AutoAttack against plain pyautoattack with verdicts compared.

    python -m benchmarks.evaluation --official PATH --threads 2

Prints Markdown. Run it from the root of a checkout, on an idle machine. The models are trained here, briefly, by FedPGD
on scikit-learn's digits (for ``cnn`` painted in colour on 32x32 pixels), so that some examples withstand and others do
not; an untrained model would leave AutoAttack nothing to do.

AutoAttack is slow: the default network for it is ``cnn_small`` on the digits as they are. ``--autoattack-model cnn``
takes hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import attack_agreement
from benchmarks.loops import CIFAR, EPS, SEED, Official, evaluation_of, network, task, trainer, usual_memory
from benchmarks.measuring import Report, Spread, alternated, command, machine, say, with_official, words
from benchmarks.work import gemm, work_of
from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.data import NO_AUGMENTATION
from calfat_plugin.evaluators.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import ThreatModel

CPU = torch.device("cpu")
STEPS = 20
_DATA = {"cnn": "digits 3x32x32", "cnn_small": "digits 1x8x8"}
_EPS = {"cnn": EPS, "cnn_small": 0.1}


def trained(name: str, count: int, epochs: int) -> tuple[nn.Module, ImageData]:
    """A network that withstands some attacks, in evaluation mode, and ``count`` images that it was not trained on."""
    data = ImageData(*attack_agreement.images(_DATA[name]))
    shape = tuple(data.x.shape[1:])
    model = network(name, (shape[0], shape[1], shape[2]))
    order = torch.arange(len(data))
    say(f"training {name} on {_DATA[name]}")
    work = task(model, data.subset(order[count:].numpy()), CPU, epochs=epochs)
    fast = ThreatModel(eps=_EPS[name], step_size=_EPS[name], steps=1)  # type: ignore[arg-type]
    settings = dataclasses.replace(work.settings, learning_rate=0.05)
    trainer("fedpgd").fit(dataclasses.replace(work, threat=fast, settings=settings, augment=NO_AUGMENTATION))
    return model.eval(), data.subset(order[:count].numpy())


def _measured(evaluator: Evaluator, model: nn.Module, data: ImageData, eps: float, batch_size: int) -> EvaluationResult:
    """One evaluation as a run makes it, the clean pass included."""
    return measure(_task(model, data, eps, batch_size), [("measured", evaluator)])["measured"]


def _task(model: nn.Module, data: ImageData, eps: float, batch_size: int) -> EvaluationTask:
    threat = ThreatModel(eps=eps, step_size=eps / 4, steps=STEPS)  # type: ignore[arg-type]
    return evaluation_of(model, data, threat, batch_size, CPU)


# --- PGD-20 -----------------------------------------------------------------------------------------------------------


def pgd(report: Report, count: int, epochs: int, batch_size: int, repeats: int, official: Official | None) -> None:
    """PGD-20 on ``cnn``: seconds, and the accuracies that say that both did the same."""
    model, data = trained("cnn", count, epochs)
    accuracies: dict[str, list[float]] = {"official code": [], "calfat_plugin": []}

    def ours() -> float:
        started = time.perf_counter()
        result = _measured(PGD(PGDOptions(steps=STEPS)), model, data, EPS, batch_size)
        accuracies["calfat_plugin"].append(result.accuracy)
        return time.perf_counter() - started

    def theirs(measure: Callable[[], tuple[float, float]]) -> Callable[[], float]:
        def seconds() -> float:
            spent, accuracy = measure()
            accuracies["official code"].append(accuracy)
            return spent

        return seconds

    loops = {} if official is None else {"official code": theirs(official.evaluation(model, data))}
    found = alternated({"matrix products": gemm(CPU), **loops, "calfat_plugin": ours}, repeats)
    operations = count * work_of(model, CIFAR).of_pgd(STEPS)
    floor = Spread(tuple(operations / rate for rate in found.pop("matrix products").values))
    first = next(iter(found.values()))
    report.keep(
        "pgd", {**found, "floor": floor, **{f"accuracy, {k}": Spread(tuple(v)) for k, v in accuracies.items() if v}}
    )
    report.table(
        f"PGD-20, `cnn`, {count:,} images of 3x32x32",
        [
            "loop",
            "seconds per 1,000 images",
            f"times as fast as {next(iter(found))}",
            "x floor",
            "accuracy under attack",
        ],
        [
            *(
                (name, time.times(1000 / count), first.over(time), time.over(floor), Spread(tuple(accuracies[name])))
                for name, time in found.items()
            ),
            ("floor, fp32", floor.times(1000 / count), first.over(floor), 1, ""),
        ],
    )


# --- AutoAttack -------------------------------------------------------------------------------------------------------


def autoattack(report: Report, name: str, count: int, epochs: int, batch_size: int, repeats: int) -> None:
    """AutoAttack ``standard``: seconds, and example by example whether both break it."""
    from pyautoattack import AutoAttack as Plain

    logging.getLogger("pyautoattack").setLevel(logging.ERROR)
    model, data = trained(name, count, epochs)
    verdicts: dict[str, list[Tensor]] = {"pyautoattack": [], "calfat_plugin": []}

    def ours() -> float:
        started = time.perf_counter()
        task_of_attack = _task(model, data, _EPS[name], batch_size)
        withstand = task_of_attack.clean_correct.clone()

        def note(where: Tensor, _: Tensor) -> None:
            withstand[where] = False

        attack = AutoAttack(AutoAttackOptions())
        measure(dataclasses.replace(task_of_attack, on_examples=note), [("measured", attack)])
        verdicts["calfat_plugin"].append(withstand)
        return time.perf_counter() - started

    @usual_memory()
    def plain() -> float:
        started = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            attack = Plain(model, eps=_EPS[name], norm="Linf", seed=SEED, version="standard", device=CPU)
            x_adv = attack.run_standard_evaluation(data.x.clone(), data.y.clone(), batch_size=batch_size)
        x_adv = x_adv if isinstance(x_adv, Tensor) else x_adv[0]
        with torch.no_grad():
            verdicts["pyautoattack"].append((model(data.x).argmax(1) == data.y) & (model(x_adv).argmax(1) == data.y))
        return time.perf_counter() - started

    found = alternated({"pyautoattack": plain, "calfat_plugin": ours}, repeats)
    reference = verdicts["pyautoattack"][0]
    different = sum(int((each != reference).sum()) for made in verdicts.values() for each in made)
    report.keep("autoattack", found)
    report.numbers["verdicts that differ"] = different
    report.table(
        f"AutoAttack, `{name}`, {count:,} images of {_DATA[name]}, {int(reference.sum())} of them withstand",
        ["by", "seconds", "times as fast as pyautoattack", "verdicts as pyautoattack's"],
        [
            (by, time, found["pyautoattack"].over(time), min(int((v == reference).sum()) for v in verdicts[by]))
            for by, time in found.items()
        ],
    )
    if different:
        say(report.markdown())
        raise SystemExit(f"AutoAttack: {different} verdicts differ, so the two are not the same attack")


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser: argparse.ArgumentParser = command(__doc__)
    with_official(parser)
    parser.add_argument("--images", type=int, default=500, help="for PGD-20; default: 500")
    parser.add_argument("--autoattack-images", type=int, default=200, help="default: 200")
    parser.add_argument("--autoattack-model", choices=list(_DATA), default="cnn_small")
    parser.add_argument("--epochs", type=int, default=8, help="of the models' training; default: 8")
    parser.add_argument("--batch-size", type=int, default=256, help="default: 256, the official code's")
    parser.add_argument("--parts", type=words, default=["pgd", "autoattack"], help="default: both")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    report = Report("Evaluation", machine(CPU))
    if "pgd" in given.parts:
        official = None if given.official is None else Official(given.official, CPU)
        pgd(report, given.images, given.epochs, given.batch_size, given.repeats, official)
    if "autoattack" in given.parts:
        autoattack(
            report,
            given.autoattack_model,
            given.autoattack_images,
            given.epochs,
            given.batch_size,
            given.repeats,
        )
    report.finish(given.json)


if __name__ == "__main__":
    main()
