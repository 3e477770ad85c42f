"""The templates: what is filled in stays text, and what is missing is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from calfat_plugin.report.charts import Drawing
from calfat_plugin.report.page import render_page, some
from calfat_plugin.report.reading import read_run
from calfat_plugin.report.run_page import run_page
from tests.report.made import change_json, made_run
from tests.report.pages import Page

NASTY = "</style></title><script>alert('1')</script> \"quoted\" & <b>"


def parsed(source: str, folder: Path) -> Page:
    path = folder / "page.html"
    path.write_text(source, encoding="utf-8")
    return Page.read(path)


def view(text: str) -> dict[str, Any]:
    """A run page with ``text`` wherever a recipe, a result or a file name can put one."""
    row = (text, text, [text])
    table = {"head": [text, text], "rows": [row]}
    drawings = [Drawing(text, text, False, "data:,")]
    alarms = [{"whose": text, "code": text, "text": text}] * 5
    found = {"checkpoint": text, "round": text, "figures": drawings}
    final = {
        "rows": [row],
        "reported": text,
        "selected": text,
        "validated": text,
        "attackers": text,
        "measured": {text: text},
        "worst": [row],
        "personal": [row],
    }
    sections = {
        "results": {
            "final": final,
            "figures": drawings,
            "rounds": {"total": text, "duration": text, "refused": 1, **table},
        },
        "clients": {"figures": drawings, "counts": table, "groups": [row]},
        "attacks": [{"name": text, "selected_on": text, "rows": [row], **found}],
        "trust": {
            **dict.fromkeys(("verdict", "sentence", "examples"), text),
            "also": [text],
            "finished": False,
            **found,
        }
        | {"rows": [row]},
        "time": [(text, [row])],
        "recipe": {"facts": {text: text}, "command": text, "text": text},
        "versions": {"machine": {text: text}, "versions": {text: text}},
        "citations": {text: text},
    }
    page = {"title": text, "lead": text, "tiles": [(text, text)], "progress": text, "figures": text}
    return {**page, "alarms": alarms, "sections": sections}


def comparison_view(text: str) -> dict[str, Any]:
    """The same for a comparison."""
    run = view(text)
    score = {"mean": text, "best": True, "spread": text, "reported": text, "difference": text, "beyond": True}
    score |= {"interval": text, "rival": text}
    rows = [{"name": text, "seeds": text, "scores": [score]}]
    sections = {
        "results": {
            "head": [text, text, text],
            "blocks": [{"problem": text, "rows": rows}] * 2,
            "several": True,
            "paired": True,
            "examples": text,
            "said": text,
            "abridged": True,
            "reported": text,
            "judged": True,
            "notes": [text],
        },
        **dict.fromkeys(("rounds", "classes", "labels"), run["sections"]["results"]["figures"]),
        "settings": {"names": [text], "rows": [(text, [text])]},
        "recipe": {text: text},
        **{name: run["sections"][name] for name in ("versions", "citations")},
    }
    return {**run, "sections": sections}


@pytest.mark.parametrize(("template", "view"), [("run.html", view), ("comparison.html", comparison_view)])
def test_text_stays_text_wherever_it_is_filled_in(
    template: str, view: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    plain = parsed(render_page(template, **view("plain")), tmp_path)
    nasty = parsed(render_page(template, **view(NASTY)), tmp_path)
    assert nasty.errors == []
    assert [tag for tag, _ in nasty.tags] == [tag for tag, _ in plain.tags]
    assert [sorted(attributes) for _, attributes in nasty.tags] == [sorted(attributes) for _, attributes in plain.tags]
    assert nasty.text.count(NASTY) == plain.text.count("plain") > 40


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_text_comes_out_as_it_went_in(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    page = parsed(render_page("run.html", **view(text)), tmp_path_factory.mktemp("page"))
    assert page.errors == []
    assert page.all("img")[0]["alt"] == f"{text}. {text}"
    assert page.all("script") == []


def test_hostile_names_in_the_files_of_a_run(tmp_path: Path) -> None:
    """From the run directory to the page: evaluators, classes, alarms, citations and versions."""
    run = made_run(tmp_path / "a", final={"natural": 0.6, "fgsm": 0.4}, classes=[NASTY, "$\\frac$", *"cdefghij"])
    results = run / "results.json"
    results.write_text(results.read_text().replace('"fgsm"', '"<script>_fgsm"'))
    change_json(
        results,
        recipe=NASTY,
        alarms=[{"code": "<script>", "text": NASTY}],
        citations=[{"text": NASTY, "bibtex": NASTY}],
    )
    change_json(run / "environment.json", platform=NASTY, versions={NASTY: NASTY}, command=["calfat", NASTY])
    figures = tmp_path / "figures"
    figures.mkdir()
    page = parsed(run_page(read_run(run), figures), tmp_path)
    assert page.errors == []
    assert page.all("script") == []
    assert page.text.startswith(NASTY)
    assert page.text.count("<script>") > 8


def test_a_template_that_names_what_is_not_there_fails() -> None:
    with pytest.raises(UndefinedError):
        render_page("run.html", **{**view("text"), "sections": {}})


def test_a_section_with_nothing_in_it_is_left_out() -> None:
    assert some(figures=[], counts=None) is None
    assert some(figures=[1], counts=None) == {"figures": [1], "counts": None}
