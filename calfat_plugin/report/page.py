"""Pages: their colours, and jinja2 templates that are filled with plain values.

HTML is written in ``templates/`` and nowhere else.

Figures are drawn in light colours. On a dark page the CSS filter :data:`DARK_FILTER` inverts their lightness and keeps
their hue. Series also differ in dash and marker, so that no reader depends on colour.

The first two colours of a series are the blue and the vermilion of Okabe and Ito (2008). The others were searched for:
as drawn and behind the filter, every pair is at least 20 apart (CIE 1976; 2 is just noticeable) for common vision,
protanopia, deuteranopia and tritanopia, and each has a contrast of 3 on its background.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from calfat_plugin.recipe.schema import HOSTS
from calfat_plugin.report.numbers import counted, signed
from calfat_plugin.stored_run import Run
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment, Template


# --- colours ----------------------------------------------------------------------------------------------------------


class Colour(NamedTuple):
    """A CSS variable of the page and its two values."""

    name: str
    light: str
    dark: str


TEXT = Colour("text", "#1d232a", "#e6e9ed")
MUTED = Colour("muted", "#586069", "#a3abb5")
LINE = Colour("line", "#d5dae0", "#39414a")
PAPER = Colour("paper", "#ffffff", "#14181d")
PANEL = Colour("panel", "#f5f7f9", "#1d232a")
ACCENT = Colour("accent", "#0069a6", "#6cb8ea")
ALARM = Colour("alarm", "#8a4b00", "#ffbf66")
ALARM_PANEL = Colour("alarm-panel", "#fff4e0", "#33260f")
SHADOW = Colour("shadow", "#9aa3ad", "#5d6874")  # of an edge beyond which a table goes on
COLOURS = (TEXT, MUTED, LINE, SHADOW, PAPER, PANEL, ACCENT, ALARM, ALARM_PANEL)

DARK_FILTER = "invert(1) hue-rotate(180deg)"
SERIES = ("#0072b2", "#d55e00", "#936ffd", "#234e3b", "#c77962", "#2f033f", "#966a8d", "#833c0f")
#: matplotlib's line styles: solid, then on-off lengths in points.
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 2)), (0, (3, 1.5, 1.5, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def series(index: int) -> str:
    """The colour of a series."""
    return SERIES[index % len(SERIES)]


def line_style(index: int, *, marked: bool) -> dict[str, Any]:
    """matplotlib's arguments for a series' line; beyond the palette colours repeat, with another dash and marker."""
    other = index + index // len(SERIES)
    marker = MARKERS[other % len(MARKERS)] if marked else ""
    return {"color": series(index), "linestyle": DASHES[other % len(DASHES)], "marker": marker}


# --- templates --------------------------------------------------------------------------------------------------------


GENERATOR = "calfat_plugin"


def render_page(template: str, **view: Any) -> str:
    """A complete HTML document. It has no scripts, and it fetches nothing."""
    return template_of(template).render(
        generator=GENERATOR, version=__version__, colours=COLOURS, dark_filter=DARK_FILTER, **view
    )


@cache
def template_of(name: str) -> Template:
    """A file of ``templates/``."""
    environment = template_environment("calfat_plugin.report", autoescape=True)
    environment.filters["signed"] = signed
    return environment.get_template(name)


def template_environment(package: str, **escaping: Any) -> Environment:
    """What reads the ``templates/`` of a package; ``escaping``: jinja2's arguments by which values become text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **escaping,
    )


def some(**parts: Any) -> dict[str, Any] | None:
    """The parts of a section; None where all of them are empty, so that the section is left out."""
    return parts if any(parts.values()) else None


def alarms_of(run: Run, whose: str = "") -> list[dict[str, str]]:
    """Each alarm in a run's results, and in those of the attacks on it, as the templates take it."""
    alarms_by_owner = {whose: run.alarms}
    for name, attack in run.attacks.items():
        alarms_by_owner[f"{whose}, {name}".removeprefix(", ")] = attack.alarms
    views = []
    for owner, alarms in alarms_by_owner.items():
        for alarm in alarms:
            views.append({"whose": owner, "code": alarm.code, "text": alarm.text})
    return views


def citations(runs: Sequence[Run]) -> dict[str, str]:
    """The papers to cite for the runs, each once: text to BibTeX."""
    bibtex: dict[str, str] = {}
    for run in runs:
        if run.final is not None:
            for citation in run.final.citations:
                bibtex.setdefault(citation.text, citation.bibtex)
    return bibtex


def environment(run: Run) -> dict[str, Any] | None:
    """Machine and versions, by term; None where no file says them."""
    stored = run.environment
    if stored is None:
        return None
    device = [stored.gpu or stored.device]
    if stored.threads is not None:
        device.append(counted(stored.threads, "thread"))
    if stored.cpu_count is not None:
        device.append(counted(stored.cpu_count, "core"))
    versions = {name: version for name, version in stored.versions.items() if version}
    machine = {}
    host = HOSTS.get(stored.host)
    if host is not None:
        machine["Host"] = f"{host.title} {versions.get(host.distribution, '')}"
    machine["Device"] = ", ".join(device)
    machine["System"] = f"Python {stored.python}, {stored.platform}"
    machine["Commit"] = stored.commit or ""
    machine["Plugins"] = ", ".join(map(str, stored.plugins))
    machine["Not loaded"] = "; ".join(map(str, stored.plugins_not_loaded))
    return {"machine": {term: text for term, text in machine.items() if text}, "versions": versions}
