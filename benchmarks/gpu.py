"""Everything that wants a GPU, in one command and under nine minutes: right results, speed, memory, a profile.

    python -m benchmarks.gpu --out FOLDER [--official PATH]

Run it from the root of a checkout. It needs torch and numpy, no FedML and nothing else that would have to be installed,
on any Python from 3.10. It writes ``gpu.json`` and ``gpu.md`` into FOLDER, after each section anew, so that a command
that is cut off leaves what it has. It ends with status 1 if a result on the GPU is not that of the CPU.

``--device cpu --quick`` is a try of all sections in a minute, without a GPU.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import CIFAR, CLASSES, PRECISIONS, SEED, Official, fit, images, network, ours
from benchmarks.measuring import Report, Spread, alternated, command, machine, say, wait_for, with_official
from benchmarks.work import METHODS, gemm, work_of
from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.federation.memory import PeakMemory
from calfat_plugin.maths.attacks import attack_mode, gradient_ascent
from calfat_plugin.maths.precision import float32_as
from calfat_plugin.threat import ThreatModel

CPU = torch.device("cpu")
ROUNDS, CLIENTS = 150, 5  # the paper's default run: 50,000 images on five clients

#: What a GPU may differ by from the CPU. Its kernels add in another order, and an attack takes signs of gradients, so
#: a last bit can turn a pixel by a whole step. Training methods draw the attack's start on the device that trains:
#: other noise, the same distribution.
TOLERANCES = {
    "logits, relative": {"fp32": 1e-5, "tf32": 5e-3},
    "gradient of the images, relative": {"fp32": 1e-4, "tf32": 2e-2},
    "loss that ten steps reach, relative": {"fp32": 1e-3, "tf32": 1e-2},
    "PGD-20 verdicts that differ, share": {"fp32": 0.005, "tf32": 0.02},
    "update of a clean epoch, relative": {"fp32": 1e-3, "tf32": 5e-2},
}
LOSS_TOLERANCE = 0.05  # of a method's mean loss, relative


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


# --- right results ----------------------------------------------------------------------------------------------------


def results_on(device: torch.device, base: nn.Module, data: ImageData, precision: str = "fp32") -> dict[str, Tensor]:
    """What :data:`TOLERANCES` compare, computed on ``device`` from the same weights, images and starts."""
    model = copy.deepcopy(base).to(device).eval()
    x, y = pixels(data.x).to(device), data.y.to(device)
    threat = ThreatModel()
    start = x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(SEED)).to(device)
    seen = x.clone().requires_grad_()
    with attack_mode(model):
        logits = model(seen)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), seen)

        def climb(out: Tensor) -> Tensor:
            return F.cross_entropy(out, y, reduction="sum")

        x_adv = gradient_ascent(
            model, x, climb, threat=threat, steps=10, step_size=float(threat.step_size), start=start
        )
        with torch.no_grad():
            reached = F.cross_entropy(model(x_adv), y)
    verdicts = torch.ones(len(y), dtype=torch.bool)

    def note(where: Tensor, points: Tensor) -> None:
        with torch.no_grad():
            verdicts[where] = model(points).argmax(1).cpu() == data.y[where.cpu()]

    measure(
        model,
        data.to(device),
        [("pgd20", PGD(PGDOptions()))],
        num_classes=CLASSES,
        threat=threat,
        batch_size=256,
        device=device,
        seed=SEED,
        on_examples=note,
    )
    _, update = fit("standard", base, data, device, precision=precision)
    moved = [update.state[name] - before for name, before in base.state_dict().items()]
    return {
        "logits, relative": logits.detach().cpu(),
        "gradient of the images, relative": gradient.cpu(),
        "loss that ten steps reach, relative": reached.cpu().reshape(1),
        "PGD-20 verdicts that differ, share": verdicts,
        "update of a clean epoch, relative": torch.cat([each.flatten() for each in moved]),
    }


def compare(report: Report, device: torch.device, count: int) -> Iterator[str]:
    """Compare a GPU's results with the CPU's; yields what is beyond its tolerance."""
    base, data, rows = network("cnn"), images(count), []
    expected = results_on(CPU, base, data)
    for precision in ("fp32", "tf32"):
        with float32_as(precision, device):
            found = results_on(device, base, data, precision)
        for name, allowed in TOLERANCES.items():
            if found[name].dtype == torch.bool:
                off = float((found[name] != expected[name]).double().mean())
            else:
                off = _relative(found[name], expected[name])
            right = off <= allowed[precision]
            rows.append((name, precision, f"{off:.2g}", f"{allowed[precision]:g}", "yes" if right else "**no**"))
            if not right:
                yield f"{name}, {precision}: {off:.2g} is more than {allowed[precision]:g}"
    report.table(
        f"{device} against cpu, `cnn`, {count} images", ["result", "in", "difference", "allowed", "within"], rows
    )


# --- speed ------------------------------------------------------------------------------------------------------------


def default_run(report: Report, device: torch.device, count: int, repeats: int, official: Official | None) -> None:
    """A round of the paper's default run in shape: CalFAT, ``cnn``, batch 128, K 10, ``count`` images a client."""
    base, data = network("cnn").to(device), images(count).to(device)
    operations = CLIENTS * count * work_of(base, CIFAR).of_method(METHODS["calfat"][1], 10)
    scale = 50_000 / (CLIENTS * count)
    times: dict[str, Spread] = {}
    floors: dict[str, Spread] = {}
    peaks: dict[str, float | None] = {}
    kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    for precision in kinds:
        if precision not in PRECISIONS:
            continue
        client = ours("calfat", base, data, device, precision=precision)
        with float32_as(precision, device):
            client()  # graphs, plans and memory of the first batches
            memory = PeakMemory(device)
            memory.begin()
            one_round = {precision: _sum_of(client), "rate": gemm(device, kinds[precision])}
            found = alternated(one_round, repeats)
        times[precision] = found[precision].times(scale)
        floors[precision] = Spread(tuple(scale * operations / rate for rate in found["rate"].values))
        peaks[precision] = memory.of_gpu() if device.type == "cuda" else memory.of_process()
    if official is not None:
        times["official code"] = alternated({"official code": _sum_of(official.local_epoch(data))}, repeats)[
            "official code"
        ].times(scale)
    report.keep("default run, seconds a round", {**times, **{f"floor, {p}": f for p, f in floors.items()}})
    report.numbers["default run, peak MB"] = peaks
    slowest = times.get("official code")
    report.table(
        f"The paper's default run in shape: 5 clients x {count:,} images, times {scale:.3g} for 50,000",
        ["in", "seconds a round", f"{ROUNDS} rounds, s", "times as fast as the official code", "x floor", "peak, MB"],
        [
            (
                name,
                time,
                f"{ROUNDS * time.median:.4g}",
                "not measured" if slowest is None else slowest.over(time),
                time.over(floors[name]) if name in floors else "",
                f"{peak:.0f}" if (peak := peaks.get(name)) is not None else "",
            )
            for name, time in times.items()
        ],
    )


def _sum_of(client: Callable[[], float]) -> Callable[[], float]:
    return lambda: sum(client() for _ in range(CLIENTS))


def methods(report: Report, device: torch.device, count: int, checked: int) -> Iterator[str]:
    """Every method for one round of a client; yields those whose loss on the GPU is not the CPU's."""
    base, data, few, rows = network("cnn"), images(count), images(checked), []
    work = work_of(base, CIFAR)
    with float32_as("fp32", device):
        for name, (_, passes) in METHODS.items():
            fit(name, base, few, device)
            seconds, _ = fit(name, base, data.to(device), device)
            there, here = (fit(name, base, few, where)[1].metrics["loss"] for where in (device, CPU))
            off = abs(there - here) / abs(here)
            rows.append((name, seconds, seconds / work.of_method(passes, 10), there, here, off))
            say(f"{name}: {seconds:.3f} s, loss {there:.4f} and {here:.4f} on the CPU")
            if off > LOSS_TOLERANCE:
                yield f"{name}: its loss differs by {off:.2g}, more than {LOSS_TOLERANCE:g}"
    per_pass = rows[0][2]
    report.numbers["methods, seconds"] = {row[0]: row[1] for row in rows}
    report.table(
        f"Methods, one client of {count:,} images for one round, fp32; losses on {checked} images, {LOSS_TOLERANCE:g} "
        "allowed",
        ["method", "seconds", "time per pass, CalFAT = 1", f"loss on {device}", "on cpu", "difference"],
        [
            (name, f"{seconds:.3g}", f"{each / per_pass:.3g}", f"{there:.4f}", f"{here:.4f}", f"{off:.2g}")
            for name, seconds, each, there, here, off in rows
        ],
    )


def profiled(device: torch.device, count: int) -> str:
    """torch.profiler's table of one client's local training, as Markdown."""
    from torch.profiler import ProfilerActivity, profile

    base, data = network("cnn"), images(count).to(device)
    fit("calfat", base, data, device)
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as found:
        fit("calfat", base, data, device)
        wait_for(device)
    averages = found.key_averages()
    by = "self_device_time_total" if gpu else "self_cpu_time_total"
    table = averages.table(sort_by=by, row_limit=15, max_name_column_width=50)
    return f"**torch.profiler: CalFAT, {count} images**\n\n```text\n{table.strip()}\n```\n"


def main(arguments: list[str] | None = None) -> None:
    """Run all sections, write, and say what is wrong."""
    parser = command(__doc__, repeats=3, json=False)
    with_official(parser)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="default: cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where gpu.json and gpu.md go")
    parser.add_argument("--quick", action="store_true", help="a try with few images")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no section begins; default: 480")
    given = parser.parse_args(arguments)
    if given.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --quick tries the command without one")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    started, device = time.monotonic(), given.device
    report, wrong = Report("GPU", machine(device)), list[str]()
    official = None if given.official is None else Official(given.official, device)
    client, few = (4, 4) if given.quick else (10_000, 512)
    tables: list[str] = []
    sections: dict[str, Callable[[], None]] = {
        "results": lambda: wrong.extend(compare(report, device, few)),
        "default run": lambda: default_run(report, device, client, 1 if given.quick else given.repeats, official),
        "methods": lambda: wrong.extend(methods(report, device, client, few)),
        "profile": lambda: tables.append(profiled(device, few)),
    }
    for name, section in sections.items():
        if (spent := time.monotonic() - started) > given.limit:
            wrong.append(f"section '{name}' was left out: {spent:.0f} s had gone, the limit is {given.limit:g} s")
            continue
        say(f"{spent:.0f} s: {name}")
        section()
        report.numbers |= {"seconds": time.monotonic() - started, "wrong": wrong}
        report.write(given.out / "gpu.json")
        text = report.markdown() + "".join(f"\n{table}" for table in tables)
        (given.out / "gpu.md").write_text(text + "".join(f"\n**Wrong:** {line}\n" for line in wrong), encoding="utf-8")
    print((given.out / "gpu.md").read_text(encoding="utf-8"), end="")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
