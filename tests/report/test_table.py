"""A table in each of its forms: what stands where, what is empty, and what is not taken for markup."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from calfat_plugin.maths.intervals import Score, with_rivals
from calfat_plugin.report.page import template_of
from calfat_plugin.report.scores import DIFFERENCES, Scored, meaning, score_tables
from calfat_plugin.report.table import Cell, Table, csv_text, latex, markdown, print_table

BEST = Cell("61.35", "0.42", ["[60.8, 61.9]", "(64.69, -3.34!)"], best=True, beyond=True)
TABLE = Table(
    "A & B",
    ["row", "n", "x_1"],
    [["a|b", "2", BEST], ["*c*", "-", ""], ["d", "1", Cell("", beside=["(50.50)"])]],
    notes=["What it *means*."],
    groups=["one", "one", "two"],
)


def html(table: Table) -> str:
    return str(template_of("macros.html").module.table(table))  # type: ignore[attr-defined]


def test_in_markdown_texts_are_escaped_and_numbers_are_not() -> None:
    rows = [" ".join(line.split()) for line in markdown(TABLE).splitlines()]
    assert rows == [
        "| row | n | x_1 |",
        "| ----- | --: | --------------------------------------------: |",
        "| a\\|b | 2 | **61.35 ± 0.42** [60.8, 61.9] (64.69, -3.34!) |",
        "| \\*c\\* | - | - |",
        "| d | 1 | - (50.50) |",
        "",
        "What it \\*means\\*.",
    ]


def test_in_latex_groups_stand_apart_and_signs_are_those_of_formulas() -> None:
    lines = latex(TABLE, "ab", ["a comment"]).splitlines()
    assert lines[3:] == [
        "  \\caption{A \\& B}",
        "  \\label{tab:ab}",
        "  \\begin{tabular}{lrr}",
        "    \\toprule",
        "    row & $n$ & x\\_1 \\\\",
        "    \\midrule",
        "    a\\textbar{}b & 2 & $\\mathbf{61.35} \\pm 0.42$ {\\scriptsize [60.8, 61.9] (64.69, $-$3.34!)} \\\\",
        "    *c* & - & -- \\\\",
        "    \\midrule",
        "    d & 1 & -- {\\scriptsize (50.50)} \\\\",
        "    \\bottomrule",
        "  \\end{tabular}",
        "\\end{table}",
        "% a comment",
    ]


def test_on_a_page_groups_have_a_heading_where_there_are_several() -> None:
    page = html(TABLE)
    assert page.count("<tbody>") == 2
    assert [page.count(f'<span class="pinned">{group}</span>') for group in ("one", "two")] == [1, 1]
    assert '<th scope="row">a|b</th><td class="number">2</td>' in page
    assert '<span class="best">61.35</span> ± 0.42<span class="beside">[60.8, 61.9]</span>' in page
    assert '<span class="beside beyond">(64.69, \N{MINUS SIGN}3.34!)</span>' in page
    assert '<td class="number">\N{EN DASH}</td>' in page
    assert '<p class="note">What it *means*.</p>' in page
    assert "pinned" not in html(Table("one", ["a"], [["b"]]))
    assert html(Table("none", ["a"], [])).strip() == ""


def test_on_a_page_texts_stay_texts() -> None:
    page = html(Table("t", ["a", "b", "c"], [["<i>", "<b>", "<u>"]], texts=2, groups=["<s>"], notes=["<p>"]))
    assert '<th scope="row">&lt;i&gt;</th><td><span class="cell">&lt;b&gt;</span></td>' in page
    assert '<td class="number">&lt;u&gt;</td>' in page
    assert '<p class="note">&lt;p&gt;</p>' in page


def test_on_a_console_what_is_beside_a_name_is_below_it_and_nothing_is_markup() -> None:
    stream = io.StringIO()
    table = Table(
        f"of [b]/{'x' * 100}",
        ["evaluator", "accuracy %"],
        [[Cell("pgd[/x]", beside=["linf, eps 8/255"]), BEST], ["x", ""]],
    )
    print_table(Console(file=stream, width=80, markup=False, _environ={}), table)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0] == f"of [b]/{'x' * 100}"  # whole: a path may stand there, to be copied
    assert lines[3].split("│") == ["pgd[/x]         ", " 61.35 ± 0.42 [60.8, 61.9] (64.69, -3.34!)"]
    assert lines[4].split("│")[0] == "linf, eps 8/255 "
    assert lines[5].split("│") == ["x               ", ""]


def test_csv_is_read_as_it_was_written() -> None:
    rows = [["cell", "note"], ["a,b", 'say "c"'], ["d", ""]]
    assert list(csv.reader(io.StringIO(csv_text(rows)))) == rows


ROWS = [
    Scored(["0.1", "rate 1", "2"], {"x": Score({0: 0.5, 1: 0.6}), "y": Score({0: 3.0}, is_accuracy=False)}, "0.1"),
    Scored(["0.2", "rate 2", "2"], {"x": Score({0: 0.4, 1: 0.51}), "y": Score({}, is_accuracy=False)}, "0.2"),
]


def test_differences_are_those_of_rows_that_have_a_rival() -> None:
    found = with_rivals({"a": ROWS[0].scores["x"], "b": ROWS[1].scores["x"]})
    rows = [row._replace(scores={**row.scores, "x": found[name]}) for name, row in zip("ab", ROWS, strict=True)]
    results, differ = score_tables(["beta", "chosen", "n"], {"x": "X", "y": "Y"}, rows, "so")
    assert (results.head, results.texts, results.notes) == (["beta", "chosen", "n", "X", "Y"], 2, ["so"])
    assert [cell.text for cell in results.cells[0]] == ["0.1", "rate 1", "2", "55.00", "3"]
    assert [row[3].best for row in results.cells] == [True, False]  # the interval of the difference excludes zero
    assert (differ.head, differ.texts, differ.notes) == (["beta", "n", "X", "Y"], 1, [DIFFERENCES])
    assert [cell.text for cell in differ.cells[1]] == ["0.2", "2", "-9.50 [-15.85, -3.15]", ""]
    assert (list(results.groups), list(differ.groups)) == (["0.1", "0.2"], ["0.1", "0.2"])
    assert not score_tables(["beta", "n"], {"x": "X"}, ROWS, "so")[1]
    assert not score_tables(["beta", "n"], {}, ROWS, "so")[0]


@pytest.mark.parametrize(
    ("sources", "tolerance", "said"),
    [
        ([None], {"x": 3.0}, None),
        (
            ["T1", "T2", "T1", None],
            {},
            "In parentheses: T1; T2, and measured (as counted there, the release's way) minus",
        ),
        (["T1"], {"x": 3.0, "z": 1.0}, "minus reported (! marks more points than: X 3)."),
    ],
)
def test_what_numbers_mean_names_sources_once_and_the_limits_of_columns(
    sources: list[str | None], tolerance: dict[str, float], said: str | None
) -> None:
    text = meaning({"x": "X", "y": "Y"}, ROWS, sources, tolerance, "", "Chosen.")
    assert "Not in percent, but as measured: Y. Chosen." in text
    assert ("In parentheses" in text) == (said is not None)
    assert said is None or said in text
