"""A local epoch: the package against the authors' code and plain loops, and against what this machine can do at best.

    python -m benchmarks.local_epoch --official PATH --threads 2

Prints Markdown. Run it from the root of a checkout, on an idle machine. The tables: CalFAT on the paper's network,
with the authors' code beside it; every method, by what it needs; every attack of training; other networks beside a
plain loop. ``x floor`` is the time over that of the necessary operations (benchmarks/work.py) at the rate of matrix
products in the same run.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.loops import CIFAR, Official, fit, images, network, ours, plain
from benchmarks.measuring import Report, Spread, alternated, command, machine, with_official, words
from benchmarks.work import METHODS, gemm, work_of
from calfat_plugin.builtin import calfat_inner_attacks
from calfat_plugin.entries import InnerAttackEntry
from calfat_plugin.results import PASSES

_GEMM = "matrix products"
PARTS = ("calfat", "methods", "attacks", "models")


def calfat(
    report: Report, count: int, steps: int, repeats: int, official: Official | None, precisions: list[str]
) -> None:
    """CalFAT on ``cnn``."""
    device, data, base = torch.device("cpu"), images(count), network("cnn")
    variants = {} if official is None else {"official code": official.local_epoch(data)}
    variants |= {
        f"calfat_plugin, {p}": ours("calfat", base, data, device, steps=steps, precision=p) for p in precisions
    }
    found = alternated({_GEMM: gemm(device), **variants}, repeats)
    floor = _floor(found.pop(_GEMM), count * work_of(base, CIFAR).of_method(METHODS["calfat"][1], steps))
    first = next(iter(found.values()))
    report.keep("calfat", {**found, "floor": floor})
    report.table(
        f"CalFAT, `cnn`, {count:,} images of 3x32x32, batch 128, K {steps}",
        [
            "loop",
            "seconds per 1,000 images",
            f"times as fast as the {'official code' if official else 'first'}",
            "x floor",
        ],
        [
            *((name, time.times(1000 / count), first.over(time), time.over(floor)) for name, time in found.items()),
            ("floor, fp32", floor.times(1000 / count), first.over(floor), 1),
        ],
    )


def methods(report: Report, names: list[str], count: int, steps: int, repeats: int) -> None:
    """Every method on ``cnn``; a method's time by the operations that it needs, CalFAT being 1."""
    device, data, base = torch.device("cpu"), images(count), network("cnn")
    names = ["calfat", *(name for name in names if name != "calfat")]
    found = alternated({name: ours(name, base, data, device, steps=steps) for name in names}, repeats)
    report.keep("methods", found)
    work = work_of(base, CIFAR)
    needed = {name: work.of_method(METHODS[name][1], steps) for name in names}
    report.table(
        f"Methods, `cnn`, {count:,} images, K {steps}",
        ["method", "seconds per 1,000 images", "passes it needs", "time per pass, CalFAT = 1"],
        [
            (
                name,
                time.times(1000 / count),
                f"{needed[name] / work.forward:.1f}",
                time.times(1 / needed[name]).over(found["calfat"].times(1 / needed["calfat"])),
            )
            for name, time in found.items()
        ],
    )


def attacks(report: Report, method: str, count: int, steps: int, repeats: int) -> None:
    """A method on ``cnn`` with each attack of training, beside PGD; the passes are counted in the loop."""
    device, data, base = torch.device("cpu"), images(count), network("cnn")
    passes: dict[str, float] = {}

    def measured(entry: InnerAttackEntry) -> float:
        inner = entry.load()(entry.config())
        seconds, update = fit(method, base, data, device, steps=steps, inner=inner)
        passes[entry.name] = update.metrics[PASSES] / count
        return seconds

    found = alternated({entry.name: partial(measured, entry) for entry in calfat_inner_attacks()}, repeats)
    report.keep(f"attacks, {method}", found)
    report.table(
        f"Attacks of training, {method}, `cnn`, {count:,} images, PGD with K {steps}",
        ["attack", "passes an image", "fewer than PGD", "seconds per 1,000 images", "times as fast as PGD"],
        [
            (
                name,
                f"{passes[name]:g}",
                f"{passes['pgd'] / passes[name]:.2g} x",
                time.times(1000 / count),
                found["pgd"].over(time),
            )
            for name, time in found.items()
        ],
    )


def models(report: Report, names: list[str], count: int, steps: int, repeats: int) -> None:
    """CalFAT on other networks, beside a plain loop on the same network."""
    device, data, rows = torch.device("cpu"), images(count), []
    for name in names:
        base = network(name)
        found = alternated(
            {
                _GEMM: gemm(device),
                "plain": plain(base, data, device, steps=steps),
                "ours": ours("calfat", base, data, device, steps=steps),
            },
            repeats,
        )
        floor = _floor(found.pop(_GEMM), count * work_of(base, CIFAR).of_method(METHODS["calfat"][1], steps))
        report.keep(name, {**found, "floor": floor})
        seconds = (found[loop].times(1000 / count) for loop in ("plain", "ours"))
        rows.append((name, *seconds, found["plain"].over(found["ours"]), found["ours"].over(floor)))
    report.table(
        f"Networks, CalFAT, {count:,} images, K {steps}",
        ["network", "plain loop, s per 1,000 images", "calfat_plugin", "times as fast", "x floor"],
        rows,
    )


def _floor(rate: Spread, operations: float) -> Spread:
    """Seconds that so many operations take at the rate of matrix products."""
    return Spread(tuple(operations / each for each in rate.values))


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = command(__doc__)
    with_official(parser)
    parser.add_argument("--images", type=int, default=1000, help="of the client; default: 1000")
    parser.add_argument("--model-images", type=int, default=128, help="for other networks; default: 128")
    parser.add_argument("--steps", type=int, default=10, help="K, of the attack; default: 10, the official code's")
    parser.add_argument("--precision", type=words, default=["fp32"], help="comma-separated: fp32, bf16, auto")
    parser.add_argument("--methods", type=words, default=list(METHODS), help="default: all")
    parser.add_argument("--models", type=words, default=["resnet18", "vgg8"])
    parser.add_argument("--parts", type=words, default=list(PARTS), help="default: all")
    given = parser.parse_args(arguments)
    if given.official is not None and given.steps != 10:
        parser.error("--steps: the official code takes ten; leave out one of the two options")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    report = Report("A local epoch", machine(torch.device("cpu")))
    official = None if given.official is None else Official(given.official, torch.device("cpu"))
    if "calfat" in given.parts:
        calfat(report, given.images, given.steps, given.repeats, official, given.precision)
    if "methods" in given.parts:
        methods(report, given.methods, given.images, given.steps, given.repeats)
    for method in ("fedpgd", "calfat") if "attacks" in given.parts else ():
        attacks(report, method, given.images, given.steps, given.repeats)
    if "models" in given.parts:
        models(report, given.models, given.model_images, given.steps, given.repeats)
    report.finish(given.json)


if __name__ == "__main__":
    main()
