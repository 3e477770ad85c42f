"""What the benchmarks share: the machine, alternated repeats with their spread, a report as Markdown and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")  # as Linux names them
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # variables that forbid units which are there


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement, in the order in which they were made."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: Spread) -> Spread:
        """Ratios, each of two measurements made one after the other."""
        return Spread(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> Spread:
        return Spread(tuple(factor * value for value in self.values))

    def __str__(self) -> str:
        """``17.3 (16.9-18.2)``: the median, the least and the greatest."""
        ends = "" if len(self.values) == 1 else f" ({min(self.values):.3g}-{max(self.values):.3g})"
        return f"{self.median:.3g}{ends}"


def alternated(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Spread]:
    """Measure each variant once, then all of them again: a machine that gets slower does so for all alike."""
    several = {name: lambda measure=measure: {"": measure()} for name, measure in variants.items()}
    return {name: spreads[""] for name, spreads in alternated_quantities(several, repeats).items()}


def alternated_quantities(
    variants: Mapping[str, Callable[[], Mapping[str, float]]], repeats: int
) -> dict[str, dict[str, Spread]]:
    """As :func:`alternated`, for measurements that give several numbers each."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for repeat in range(1, repeats + 1):
        for name, measure in variants.items():
            numbers = measure()
            for quantity, value in numbers.items():
                found[name].setdefault(quantity, []).append(value)
            said = ", ".join(f"{quantity} {value:.4g}".lstrip() for quantity, value in numbers.items())
            say(f"{repeat}/{repeats} {name}: {said}")
    return {
        name: {quantity: Spread(tuple(values)) for quantity, values in each.items()} for name, each in found.items()
    }


def say(line: str) -> None:
    """Progress, beside the report on standard output."""
    print(line, file=sys.stderr, flush=True)


def wait_for(device: torch.device) -> None:
    """Let a GPU finish what it was given, so that the clock sees it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the machine ------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on, ready for JSON."""
    flags = _cpuinfo("flags") or _cpuinfo("Features")
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector units": [unit for unit in _UNITS if unit in flags.split()],
        "used by torch": torch.backends.cpu.get_cpu_capability(),
        "forbidden by": {name: os.environ[name] for name in _LIMITS if name in os.environ},
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def described(found: Mapping[str, Any]) -> str:
    """The machine in a sentence, with a warning where it was not idle."""
    units = ", ".join(found["vector units"]) or "none known"
    limits = "".join(f", {name}={value}" for name, value in found["forbidden by"].items())
    gpu = f"{found['gpu']}; " if found["gpu"] else ""
    busy = "" if found["load"] < 0.5 * found["cores"] else f" **Not idle: load {found['load']:.1f} at the start.**"
    return (
        f"{gpu}{found['processor']}, {found['cores']} cores, {found['threads']} threads; vector units: {units} "
        f"(torch uses {found['used by torch']}{limits}); torch {found['torch']}, Python {found['python']}.{busy}"
    )


# --- command line and report ------------------------------------------------------------------------------------------


def command(module_doc: str | None, *, repeats: int = 5, json: bool = True) -> argparse.ArgumentParser:
    """The options that every benchmark has; ``json``: whether it can write its numbers to a file of any name."""
    parser = argparse.ArgumentParser(
        description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=_at_least_one, default=repeats, help=f"alternated; default: {repeats}")
    parser.add_argument("--threads", type=_at_least_one, help="CPU threads of torch; default: torch's own choice")
    if json:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    return parser


def with_official(parser: argparse.ArgumentParser) -> None:
    """The option of benchmarks that compare with the authors' code."""
    parser.add_argument(
        "--official", type=_checkout, metavar="PATH", help="a checkout of cc233/CalFAT, which is run as shipped"
    )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return int(text)


def _checkout(text: str) -> Path:
    if not (Path(text) / "fat.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} holds no fat.py; expected a checkout: git clone https://github.com/cc233/CalFAT"
        )
    return Path(text).resolve()


def words(text: str) -> list[str]:
    """Comma-separated words of an option."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers of an option."""
    return [_at_least_one(word) for word in words(text)]


@dataclass
class Report:
    """Tables on their way to standard output and to a file."""

    title: str
    machine: Mapping[str, Any]
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def table(self, heading: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
        """Add a table; cells are shown as texts."""
        self.tables.append((heading, columns, [list(map(str, row)) for row in rows]))

    def keep(self, group: str, measured: Mapping[str, Spread]) -> None:
        """Add measurements to what is written as JSON."""
        self.numbers[group] = {name: asdict(spread) | {"median": spread.median} for name, spread in measured.items()}

    def markdown(self) -> str:
        """The whole report, to be pasted into docs/speed.md."""
        parts = [f"### {self.title}", described(self.machine)]
        for heading, columns, rows in self.tables:
            rule = ["---", *["---:"] * (len(columns) - 1)]
            lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
            parts += [*([f"**{heading}**"] if heading else []), "\n".join(lines)]
        return "\n\n".join(parts) + "\n"

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        content = {
            "title": self.title,
            "machine": self.machine,
            "numbers": self.numbers,
            "tables": [dict(zip(("heading", "columns", "rows"), table, strict=True)) for table in self.tables],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def finish(self, path: Path | None) -> None:
        """Print, and write JSON where asked for."""
        print(self.markdown(), end="")
        if path is not None:
            self.write(path)
