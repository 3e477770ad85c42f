"""``calfat plugins``: what a recipe can name, as a list and as an explanation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from calfat_plugin import __version__, registry
from calfat_plugin.entries import KINDS, AggregatorEntry, Citation, Entry, ModifierEntry, Preset, TrainerEntry
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.options import option
from calfat_plugin.registry import Provider, Registry
from tests.cli.runner import calfat
from tests.snapshot import TextSnapshot


class Point:
    """An entry point that need not be installed."""

    def __init__(self, name: str, plugin: Any) -> None:
        self.name, self.module, self._plugin = name, name.replace("-", "_"), plugin

    def load(self) -> Any:
        if isinstance(self._plugin, Exception):
            raise self._plugin
        return self._plugin


Installed = list[tuple[Provider, Point]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """What is installed here, in place of what really is; tests add to it."""
    points: Installed = []
    monkeypatch.setattr(registry, "_installed", lambda: iter(points))
    return points


@pytest.fixture(autouse=True)
def only_built_ins(installed: Installed) -> None:
    """Unless a test adds to them."""


def add(installed: Installed, distribution: str, plugin: Any) -> None:
    installed.append((Provider(distribution, "1.1", distribution), Point(distribution, plugin)))


# --- the list ---------------------------------------------------------------------------------------------------------


def test_everything_is_listed_by_kind_in_80_plain_columns() -> None:
    ended = calfat("plugins")
    assert (ended.code, ended.err) == (0, "")
    everything = Registry.load(entry_points=False)
    for kind in KINDS:
        part = f"\n{ended.out}".partition(f"\n{kind.kind}s   ")[2].partition("\n\n")[0]
        text = " ".join(part.split())
        for entry, _ in everything.offers(kind):
            name = entry.name if entry.number_option is None else f"{entry.name}<{entry.number_option}>"
            assert f"\n  {name} " in f"\n{part}"
            assert entry.summary.split()[0] in text
    assert f"calfat-plugin {__version__}" in ended.out
    assert ended.out.endswith("\ncalfat plugins NAME explains one of them.\n")
    odd = [line for line in ended.out.splitlines() if len(line) > 80 or line != line.rstrip() or not line.isascii()]
    assert odd == []
    assert ended.out.replace("\n", "").isprintable()


def test_what_was_not_loaded_is_reported_with_what_to_do(installed: Installed, snapshot: TextSnapshot) -> None:
    add(installed, "slow-at", ModuleNotFoundError("No module named 'apex'"))
    ended = calfat("plugins")
    assert ended.code == 0
    snapshot(ended.out[ended.out.index("\nnot loaded: slow-at (slow-at 1.1): Mod") :])


# --- one of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """One option of each kind."""

    share: float = option(0.5, low=0, high=1, help="how much of it")
    eps: Fraction | None = option(
        None,
        low=0,
        unit="fraction of the pixel range",
        help="radius; null: that of the run, as every help that is longer than a line gets wrapped",
    )
    on: bool = option(True, help="whether")
    path: str = option(help="where from")


class Everything:
    """Offers a method with all that an entry can have, and an aggregator of the same name."""

    @hookimpl
    def calfat_local_trainers(self) -> Iterator[TrainerEntry]:
        yield TrainerEntry(
            "everything",
            build=dict,
            config=Options,
            summary="has all that an entry can have",
            formula="min CE(f(x), y)",
            modifiers=("plain",),
            conflicts={"scaffold": "both correct the drift."},
            presets={
                "wide": Preset("a wide ball", {"eps": Fraction(16, 255), "path": "here"}),
                "rest": Preset(
                    "for the rest of the recipe",
                    {},
                    lambda dataset: {
                        "train_args.epochs": 2,
                        "calfat.aggregator": {"name": "fedavg", "weights": dataset},
                    },
                ),
            },
            citation=Citation(
                "Doe, Everything, 2024", "@misc{doe,\n  title = {A title that is long enough to be " + "x" * 60 + "}\n}"
            ),
        )

    @hookimpl
    def calfat_loss_modifiers(self) -> Iterator[ModifierEntry]:
        yield ModifierEntry("theirs", build=dict, summary="composes from its side", methods=("everything",))

    @hookimpl
    def calfat_aggregators(self) -> Iterator[AggregatorEntry]:
        yield AggregatorEntry("everything", build=dict, summary="has hardly anything")


def test_a_distribution_that_requires_another_version_is_named(installed: Installed) -> None:
    provider = Provider("slow-at", "1.1", "slow-at", unmet="calfat-plugin>=99")
    installed.append((provider, Point("slow-at", Everything())))
    said = f"warning: slow-at 1.1 requires calfat-plugin>=99, and this is calfat-plugin {__version__}"
    assert said in calfat("plugins").out
    assert " ".join(calfat("plugins", "everything").out.split()).count(said) == 2  # a method and an aggregator


def test_a_name_of_several_kinds_is_explained_for_each(installed: Installed, snapshot: TextSnapshot) -> None:
    add(installed, "all", Everything())
    ended = calfat("plugins", "everything")
    assert (ended.code, ended.err) == (0, "")
    snapshot(ended.out)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("pgd20", [" • pgd20 is {name: pgd, steps: 20}"]),
        ("mnist", [" • Classes: 10", " • Images: 1 x 28 x 28 (channels first)"]),
        ("image_folder", [" • Classes: as the files say", " • Images: as the files say"]),
        ("dirichlet", [" • alpha: data_args.partition_alpha"]),
        ("calfat", [" • Loss modifiers: none, it has its own loss"]),
    ],
)
def test_what_only_some_entries_have(name: str, lines: list[str]) -> None:
    shown = calfat("plugins", name).out.splitlines()
    assert [line for line in lines if line not in shown] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_explanation_fits_80_columns(kind: type[Entry]) -> None:
    """BibTeX aside, which is shown as it is."""
    registry = Registry.load(entry_points=False)
    cited = [
        entry.citation.bibtex for each in KINDS for entry, _ in registry.offers(each) if entry.citation is not None
    ]
    bibtex = {line for text in cited for line in text.splitlines()}
    for name in registry.names(kind):
        shown = calfat("plugins", name)
        assert shown.code == 0
        assert [line for line in shown.out.splitlines() if len(line) > 80 and line not in bibtex] == []
        assert "…" not in shown.out  # nothing is cut off


def test_an_unknown_name_is_refused(installed: Installed, snapshot: TextSnapshot) -> None:
    add(installed, "slow-at", ModuleNotFoundError("No module named 'apex'"))
    for name in ("calfatt", "aa", "zzz"):
        ended = calfat("plugins", name)
        assert (ended.code, ended.out) == (2, "")
        snapshot(ended.err)
