"""Pages: jinja2 templates, filled with plain values. HTML is written in ``templates/`` and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from calfat_plugin.recipe.schema import HOSTS
from calfat_plugin.report import theme
from calfat_plugin.report.numbers import counted, signed
from calfat_plugin.report.reading import RunFiles
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


def alarms_of(run: RunFiles, whose: str = "") -> list[dict[str, str]]:
    """(whose, code, text) of each alarm in a run's results, and in those of the attacks on it."""
    files = {whose: run.results, **{f"{whose}, {name}".removeprefix(", "): run.attacks[name] for name in run.attacks}}
    return [
        {"whose": owner, "code": alarm["code"], "text": alarm["text"]}
        for owner, content in files.items()
        for alarm in content.get("alarms") or ()
    ]


def citations(runs: Sequence[RunFiles]) -> dict[str, str]:
    """The papers to cite for the runs, each once: text to BibTeX."""
    cited: dict[str, str] = {}
    for citation in (citation for run in runs for citation in run.results.get("citations") or ()):
        cited.setdefault(str(citation["text"]), str(citation.get("bibtex") or ""))
    return cited


def environment(run: RunFiles) -> dict[str, Any] | None:
    found = run.environment
    if not found:
        return None
    words = (("threads", "thread"), ("cpu_count", "core"))
    counts = [counted(found[key], one) for key, one in words if isinstance(found.get(key), int)]
    versions = {name: version for name, version in (found.get("versions") or {}).items() if version}
    host = HOSTS.get(str(found.get("host")))
    machine = {
        "Host": f"{host.title} {versions.get(host.distribution, '')}" if host else None,
        "Device": ", ".join((str(found.get("gpu") or found.get("device")), *counts)),
        "System": f"Python {found.get('python')}, {found.get('platform')}",
        "Commit": found.get("commit"),
        "Plugins": ", ".join(map(str, found.get("plugins") or ())),
        "Not loaded": "; ".join(map(str, found.get("plugins_not_loaded") or ())),
    }
    return {"machine": {term: value for term, value in machine.items() if value}, "versions": versions}
