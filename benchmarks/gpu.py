"""Everything that wants a GPU, in one command and under nine minutes: right results, speed, memory, a profile.

    python -m benchmarks.gpu --out FOLDER [--official PATH]

Run it from the root of a checkout. It needs torch, torchvision and numpy, no FedML and nothing else that would have to
be installed, on any Python from 3.10. It writes ``gpu.json`` and ``gpu.md`` into FOLDER, after each part anew, so that
a command that is cut off leaves what it has. Parts that are right come first, then those that measure, cheapest first;
what does not fit into ``--limit`` is left out by name. It ends with status 1 if a result on the GPU is not that of the
CPU, or if a part failed or was left out.

``--device cpu --quick`` is a try of all parts in a minute, without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks import gpu_results
from benchmarks.gpu_results import LOSS_TOLERANCE, differences, evaluated
from benchmarks.loops import CIFAR, PRECISIONS, Official, fit, images, network, ours
from benchmarks.measuring import Report, Spread, alternated, command, machine, say, wait_for, with_official
from benchmarks.work import METHODS, gemm, work_of
from calfat_plugin.maths.passes import Precision, float32_as
from calfat_plugin.profiling import MB, PeakMemory

ROUNDS, CLIENTS, IMAGES = 150, 5, 50_000  # the paper's default run


@dataclass
class Bench:
    """What the parts share."""

    device: torch.device
    report: Report
    count: int
    few: int
    repeats: int
    ends: float
    official: Official | None
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def row(self, heading: str, **cells: object) -> None:
        """Add a row to the table of this heading; the names are the columns, underscores for blanks."""
        if heading not in self.tables:
            self.report.table(heading, [name.replace("_", " ") for name in cells], [])
            self.tables[heading] = self.report.tables[-1][2]
        self.tables[heading].append([str(cell) for cell in cells.values()])

    def verdict(self, right: bool, complaint: str) -> str:
        """A cell that says whether; where not, the benchmark fails with the complaint."""
        if not right:
            self.wrong.append(complaint)
        return "yes" if right else "**no**"

    def fitting(self, what: str, seconds: float) -> int:
        """How many repeats of so many seconds each can be made, at most those asked for; 0 is noted as left out."""
        repeats = min(self.repeats, int((self.ends - time.monotonic()) / seconds))
        if repeats < 1:
            self.wrong.append(f"'{what}' was left out: one repeat takes {seconds:.0f} s, which is more than is left")
        return max(0, repeats)


# --- right results ----------------------------------------------------------------------------------------------------


def results(bench: Bench, precision: Precision) -> None:
    """Compare what the GPU computes with what the CPU computes in full float32."""
    for name, off, allowed in differences(bench.device, bench.few, precision):
        right = bench.verdict(off <= allowed, f"{name}, {precision}: {off:.2g} is more than {allowed:g}")
        bench.row(
            f"{bench.device} against cpu, `cnn`, {bench.few} images",
            result=name,
            **{"in": precision},
            difference=f"{off:.2g}",
            allowed=f"{allowed:g}",
            within=right,
        )


def method_for_one_round(bench: Bench, name: str) -> None:
    """A round of one client: its time, and its loss on the GPU beside the CPU's."""
    base, data, few = network("cnn"), images(bench.count).to(bench.device), images(bench.few)
    fit(name, base, few, bench.device)
    seconds, _ = fit(name, base, data, bench.device)
    there, here = (fit(name, base, few, where)[1].metrics["loss"] for where in (bench.device, gpu_results.CPU))
    off = abs(there - here) / abs(here)
    work = work_of(base, CIFAR)
    bench.report.numbers.setdefault("methods, seconds", {})[name] = seconds
    bench.row(
        f"Methods, one client of {bench.count:,} images for one round, fp32; losses on {bench.few} images",
        method=name,
        seconds=f"{seconds:.3g}",
        TFLOP_a_second=f"{bench.count * work.of_method(METHODS[name][1], 10) / seconds / 1e12:.3g}",
        **{f"loss_on_{bench.device}": f"{there:.4f}"},
        on_cpu=f"{here:.4f}",
        difference=f"{off:.2g}",
        within=bench.verdict(
            off <= LOSS_TOLERANCE, f"{name}: its loss differs by {off:.2g}, more than {LOSS_TOLERANCE:g}"
        ),
    )


# --- speed ------------------------------------------------------------------------------------------------------------


def default_run(bench: Bench, precision: Precision) -> None:
    """A round of the paper's default run in shape: CalFAT, ``cnn``, batch 128, K 10, all clients alike."""
    base = network("cnn").to(bench.device)
    operations = CLIENTS * bench.count * work_of(base, CIFAR).of_method(METHODS["calfat"][1], 10)
    scale = IMAGES / (CLIENTS * bench.count)
    client = _client(bench, precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with float32_as(precision, bench.device), _watched(bench.device) as memory:
        repeats = bench.fitting(f"default run, {precision}", CLIENTS * client())
        if not repeats:
            return
        found = alternated({precision: _round_of(client), "rate": gemm(bench.device, dtype)}, repeats)
        peak = memory()
    seconds = found[precision].times(scale)
    floor = Spread(tuple(scale * operations / rate for rate in found["rate"].values))
    bench.report.numbers.setdefault("default run", {})[precision] = {
        "seconds a round": seconds.values,
        "floor": floor.values,
        "peak MB": peak,
    }
    bench.row(
        f"The paper's default run in shape: {CLIENTS} x {bench.count:,} images, times {scale:.3g} for {IMAGES:,}",
        **{"in": precision},
        seconds_a_round=seconds,
        **{f"{ROUNDS}_rounds,_s": f"{ROUNDS * seconds.median:.4g}"},
        floor=floor,
        x_floor=seconds.over(floor),
        **{"peak,_MB": f"{peak:.0f}" if peak is not None else ""},
    )


def small_client(bench: Bench) -> None:
    """A client of two batches."""
    few = min(bench.count, 256)
    client = _client(bench, "fp32", few)
    client()
    bench.row(
        f"CalFAT, one client of {few} images, fp32",
        seconds=alternated({"client": client}, bench.repeats)["client"],
    )


def evaluation(bench: Bench) -> None:
    """PGD-20 on a part of a test set."""
    count = min(bench.count, 2000)
    attack = partial(evaluated, bench.device, count)
    attack()
    bench.row(
        f"PGD-20, {count:,} images in batches of {gpu_results.EVALUATED_AT_ONCE}",
        seconds=alternated({"PGD-20": attack}, bench.repeats)["PGD-20"],
    )


def beside_official(bench: Bench) -> None:
    """The authors' code as shipped, alternated with ours."""
    if bench.official is None:
        return
    official = bench.official.local_epoch(images(bench.count).to(bench.device))
    ours = _client(bench, "fp32")
    ours()
    repeats = bench.fitting("official code", official())
    if not repeats:
        return
    with float32_as("fp32", bench.device):
        found = alternated({"official code": official, "calfat-plugin": ours}, repeats)
    bench.report.keep("beside the official code, seconds a client", found)
    for name, seconds in found.items():
        bench.row(
            f"Beside the official code: one client of {bench.count:,} images for one round, fp32",
            loop=name,
            seconds=seconds,
            times_as_fast=found["official code"].over(seconds),
        )


def profiled(bench: Bench) -> None:
    """torch.profiler's table of one client's local training, and how much of the time the GPU works."""
    from torch.profiler import ProfilerActivity, profile

    client, gpu = _client(bench, "fp32", bench.few), bench.device.type == "cuda"
    client()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as found:
        client()
    averages, seconds = found.key_averages(), client()
    if gpu:
        busy = sum(each.self_device_time_total for each in averages) / 1e6
        bench.row(
            f"CalFAT, {bench.few} images: how much of the time the GPU works",
            seconds=f"{seconds:.4g}",
            kernels=f"{busy:.4g}",
            share=f"{busy / seconds:.0%}",
        )
    by = "self_device_time_total" if gpu else "self_cpu_time_total"
    table = averages.table(sort_by=by, row_limit=15, max_name_column_width=50).strip()
    bench.texts.append(f"**torch.profiler: CalFAT, {bench.few} images**\n\n```text\n{table}\n```\n")


def _client(bench: Bench, precision: Precision, count: int | None = None) -> Callable[[], float]:
    """What measures one client's round once."""
    base, data = network("cnn").to(bench.device), images(count or bench.count).to(bench.device)
    return ours("calfat", base, data, bench.device, precision=precision)


def _round_of(client: Callable[[], float]) -> Callable[[], float]:
    return lambda: sum(client() for _ in range(CLIENTS))


@contextmanager
def _watched(device: torch.device) -> Iterator[Callable[[], float | None]]:
    """What gives the peak of memory so far, in MB: on a GPU all that torch holds there."""
    memory = PeakMemory(device)
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.empty_cache()
    memory.begin()
    if device.type == "cuda":
        yield lambda: torch.cuda.max_memory_reserved(device) / MB
    else:
        yield memory.of_process


# --- the command ------------------------------------------------------------------------------------------------------


def parts(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """All that is done, in this order."""
    for precision in PRECISIONS:
        yield f"results, {precision}", partial(results, bench, precision)
    for method in METHODS:
        yield f"method, {method}", partial(method_for_one_round, bench, method)
    yield "small client", partial(small_client, bench)
    yield "evaluation", partial(evaluation, bench)
    yield "profile", partial(profiled, bench)
    for precision in PRECISIONS:
        yield f"default run, {precision}", partial(default_run, bench, precision)
    yield "official code", partial(beside_official, bench)


def main(arguments: list[str] | None = None) -> None:
    """Go through the parts, write after each, and say what is wrong."""
    given = _given(arguments)
    started, device = time.monotonic(), given.device
    official = None if given.official is None else Official(given.official, device)
    bench = Bench(
        device,
        Report("GPU", machine(device)),
        count=4 if given.quick else IMAGES // CLIENTS,
        few=4 if given.quick else 512,
        repeats=1 if given.quick else given.repeats,
        ends=started + given.limit,
        official=official,
    )
    for name, part in parts(bench):
        spent = time.monotonic() - started
        if spent > given.limit:
            bench.wrong.append(f"'{name}' was left out: {spent:.0f} s had gone, the limit is {given.limit:g} s")
            continue
        say(f"{spent:.0f} s: {name}")
        try:
            part()
        except Exception as error:  # the card may be there this once: the other parts are wanted all the same
            traceback.print_exc()
            bench.wrong.append(f"'{name}' failed: {type(error).__name__}: {error}")
        _write(bench, given.out, time.monotonic() - started)
    _write(bench, given.out, time.monotonic() - started)
    print((given.out / "gpu.md").read_text(encoding="utf-8"), end="")
    if bench.wrong:
        sys.exit("\n".join(bench.wrong))


def _given(arguments: list[str] | None) -> argparse.Namespace:
    parser = command(__doc__, repeats=3, json=False)
    with_official(parser)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="default: cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where gpu.json and gpu.md go")
    parser.add_argument("--quick", action="store_true", help="a try with few images")
    parser.add_argument("--limit", type=float, default=450, help="seconds after which no part begins; default: 450")
    given = parser.parse_args(arguments)
    if given.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch sees no GPU here; --device cpu --quick tries the command without one")
        given.device = torch.device("cuda", given.device.index or 0)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    return given


def _write(bench: Bench, folder: Path, seconds: float) -> None:
    bench.report.numbers |= {"seconds": seconds, "wrong": bench.wrong}
    bench.report.write(folder / "gpu.json")
    wrong = "".join(f"\n**Wrong:** {line}\n" for line in bench.wrong)
    text = bench.report.markdown() + "".join(f"\n{each}" for each in bench.texts) + wrong
    (folder / "gpu.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
