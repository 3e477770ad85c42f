"""Pages: jinja2 templates, filled with plain values. HTML is written in ``templates/`` and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from calfat_plugin.recipe.schema import HOSTS
from calfat_plugin.report import theme
from calfat_plugin.report.numbers import counted, signed
from calfat_plugin.stored_run import Run
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template

GENERATOR = "calfat_plugin"


def render_page(template: str, **view: Any) -> str:
    """The whole document: no scripts, and nothing that is fetched from anywhere."""
    return template_of(template).render(
        generator=GENERATOR, version=__version__, colours=theme.PAGE, dark_filter=theme.DARK_FILTER, **view
    )


@cache
def template_of(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("calfat_plugin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["signed"] = signed
    return environment.get_template(name)


def some(**parts: Any) -> dict[str, Any] | None:
    """The parts of a section; None where all of them are empty, so that the section is left out."""
    return parts if any(parts.values()) else None


def alarms_of(run: Run, whose: str = "") -> list[dict[str, str]]:
    """(whose, code, text) of each alarm in a run's results, and in those of the attacks on it."""
    by_owner = {whose: run.alarms}
    for name, attack in run.attacks.items():
        by_owner[f"{whose}, {name}".removeprefix(", ")] = attack.alarms
    alarms = []
    for owner, found in by_owner.items():
        alarms += [{"whose": owner, "code": alarm.code, "text": alarm.text} for alarm in found]
    return alarms


def citations(runs: Sequence[Run]) -> dict[str, str]:
    """The papers to cite for the runs, each once: text to BibTeX."""
    cited: dict[str, str] = {}
    for run in runs:
        if run.final is not None:
            for citation in run.final.citations:
                cited.setdefault(citation.text, citation.bibtex)
    return cited


def environment(run: Run) -> dict[str, Any] | None:
    """Machine and versions, by term; None where no file says them."""
    of_run = run.environment
    if of_run is None:
        return None
    device = [of_run.gpu or of_run.device]
    if of_run.threads is not None:
        device.append(counted(of_run.threads, "thread"))
    if of_run.cpu_count is not None:
        device.append(counted(of_run.cpu_count, "core"))
    versions = {name: version for name, version in of_run.versions.items() if version}
    machine = {}
    host = HOSTS.get(of_run.host)
    if host is not None:
        machine["Host"] = f"{host.title} {versions.get(host.distribution, '')}"
    machine["Device"] = ", ".join(device)
    machine["System"] = f"Python {of_run.python}, {of_run.platform}"
    machine["Commit"] = of_run.commit or ""
    machine["Plugins"] = ", ".join(map(str, of_run.plugins))
    machine["Not loaded"] = "; ".join(map(str, of_run.plugins_not_loaded))
    return {"machine": {term: text for term, text in machine.items() if text}, "versions": versions}
