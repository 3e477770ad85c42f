"""Parts that the page of a run and the page of a comparison share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from calfat_plugin import __version__
from calfat_plugin.report import theme
from calfat_plugin.report.markup import Markup, details, element, facts, joined, section
from calfat_plugin.report.reading import RunFiles

GENERATOR = "calfat_plugin"
_MOST_ALARMS = 4  # in full; a suite may have one for each of its runs


def page(title: str, lead: str, head: Iterable[str], parts: Sequence[Markup], figures: str) -> str:
    """The whole document: no scripts, and nothing that is fetched from anywhere.

    Args:
        title: of the page.
        lead: a line below it.
        head: what stands above the table of contents.
        parts: sections; empty ones are left out.
        figures: name of the folder beside the page with its figures.
    """
    style = (files("calfat_plugin.report") / "page.css").read_text(encoding="utf-8")
    variables = (
        f":root {{ {theme.css_variables('light')} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {theme.css_variables('dark')} }} }}\n"
        f"@media print {{ :root {{ color-scheme: light; {theme.css_variables('light')} }} }}\n"
    )
    shown = [part for part in parts if part]
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="generator", content=f"{GENERATOR} {__version__}"),
            element("title", title),
            # An icon of its own, or browsers ask the server for one.
            Markup('<link rel="icon" href="data:,">'),
            Markup(f"<style>\n{style}{variables}</style>"),
        ),
        element(
            "body",
            element("header", element("h1", title), element("p", lead, class_="lead"), *head, _contents(shown)),
            element("main", *shown),
            element(
                "footer",
                element(
                    "p",
                    f"Made by calfat_plugin {__version__}. The figures also lie in ",
                    element("code", f"{figures}/"),
                    " beside this page, as SVG and as PNG.",
                ),
            ),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _contents(parts: Sequence[Markup]) -> Markup:
    """Links to the sections, from their anchors and headings."""
    links = []
    for part in parts:
        anchor = part.partition(' id="')[2].partition('"')[0]
        heading = Markup(part.partition("<h2>")[2].partition("</h2>")[0])
        links.append(element("li", element("a", heading, href=f"#{anchor}")))
    return element("nav", element("ul", *links), aria_label="Sections")


def alarms(found: Sequence[tuple[str, str, str]]) -> Markup:
    """The box of alarms: (whose, code, text). Empty where there is none; many are listed by code and folded away."""
    if not found:
        return Markup()
    items = [
        element("li", Markup(element("strong", f"{code}: ") if code else ""), f"{whose}: " if whose else "", text)
        for whose, code, text in found
    ]
    shown: list[Markup] = [element("ul", *items)]
    if len(found) > _MOST_ALARMS and all(whose for whose, _, _ in found):
        owners = {code: [whose for whose, of, _ in found if of == code] for _, code, _ in found}
        brief = [element("li", element("strong", f"{code}: "), "; ".join(names)) for code, names in owners.items()]
        shown = [element("ul", *brief), details("What was seen", *shown)]
    count = "An alarm" if len(found) == 1 else f"{len(found)} alarms"
    return element("div", element("strong", f"{count} about these numbers"), *shown, class_="alarms", role="note")


def alarms_of(run: RunFiles, whose: str = "") -> list[tuple[str, str, str]]:
    """(whose, code, text) of each alarm in a run's results, and in those of the attacks on it."""
    files = {whose: run.results, **{f"{whose}, {name}".removeprefix(", "): run.attacks[name] for name in run.attacks}}
    return [
        (owner, str(alarm.get("code", "")), str(alarm.get("text", "")))
        for owner, content in files.items()
        for alarm in content.get("alarms") or ()
    ]


def citations(runs: Sequence[RunFiles]) -> Markup:
    """What the runs owe, each once, with BibTeX."""
    owed: dict[str, str] = {}
    for run in runs:
        for citation in run.results.get("citations") or ():
            owed.setdefault(str(citation["text"]), str(citation.get("bibtex") or ""))
    if not owed:
        return Markup()
    items = [
        element("li", text, element("pre", element("code", bibtex)) if bibtex else Markup())
        for text, bibtex in owed.items()
    ]
    return section(
        "citations",
        "Citations owed",
        element("p", "Whoever publishes these numbers builds on:"),
        element("ol", *items, class_="citations"),
    )


def environment(run: RunFiles) -> Markup:
    """Versions and machine."""
    found = run.environment
    if not found:
        return Markup()
    versions: Mapping[str, Any] = found.get("versions") or {}
    device = found.get("gpu") or found.get("device")
    pairs = [
        ("Device", f"{device}, {found.get('threads')} threads, {found.get('cpu_count')} cores"),
        ("System", f"Python {found.get('python')}, {found.get('platform')}"),
    ]
    if found.get("commit"):
        pairs.append(("Commit", str(found["commit"])))
    installed = [(name, str(version)) for name, version in versions.items() if version]
    missing = found.get("plugins_not_loaded") or ()
    loaded = [
        ("Plugins", ", ".join(map(str, found.get("plugins") or ()))),
        *([("Not loaded", "; ".join(map(str, missing)))] if missing else []),
    ]
    return section("versions", "Versions", facts([*pairs, *loaded]), facts(installed, small=True))


def recipe_details(text: str) -> Markup:
    """The recipe, folded away."""
    return details("The recipe in full", element("pre", element("code", text)))


def figures_block(charts: Iterable[Markup]) -> Markup:
    """Charts side by side where there is room; empty without any."""
    inside = joined(charts)
    return element("div", inside, class_="figures") if inside else Markup()
