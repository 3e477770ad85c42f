"""The templates: what is filled in stays text, and what is missing is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from calfat_plugin.report import write_comparison, write_run_report
from calfat_plugin.report.page import render_page, some
from tests.report.made import change_json, full_run
from tests.report.pages import Page

NASTY = "</style></title><script>alert('1')</script> \"quoted\" & <b>"


@pytest.mark.usefixtures("no_figures")
def test_hostile_names_in_the_files_of_a_run_stay_text(tmp_path: Path) -> None:
    """From the run directory to the page of the run and a comparison: evaluators, classes, alarms, citations ..."""
    for seed in (0, 1):
        run = full_run(tmp_path / "runs" / str(seed), f"common_args.random_seed={seed}")
        results = run / "results.json"
        results.write_text(results.read_text().replace('"fgsm"', '"<script>_fgsm"'))
        alarms = [{"code": "<script>", "text": NASTY, "labels": [NASTY]}] * 5
        change_json(results, recipe=NASTY, alarms=alarms, citations=[{"text": NASTY, "bibtex": NASTY}])
        change_json(run / "partition.json", class_names=[NASTY, "$\\frac$", *"cdefghij"])
        change_json(run / "environment.json", platform=NASTY, versions={NASTY: NASTY}, command=["calfat", NASTY])
        change_json(run / "attacks" / "best-robust.json", checkpoint=NASTY, selected_on=NASTY)
    pages = [Page.read(write_run_report(run)), Page.read(write_comparison([tmp_path / "runs"]))]
    for page in pages:
        assert page.errors == []
        assert page.all("script") == []
        assert page.text.count("<script>") > 8
    assert pages[0].text.startswith(NASTY)


def test_a_template_that_names_what_is_not_there_fails() -> None:
    with pytest.raises(UndefinedError):
        render_page("run.html", title="a", lead="b", tiles=[], progress="", alarms=[], figures="figures", sections={})


def test_a_section_with_nothing_in_it_is_left_out() -> None:
    assert some(figures=[], counts=None) is None
    assert some(figures=[1], counts=None) == {"figures": [1], "counts": None}
