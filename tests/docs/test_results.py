"""The results page and README show what the committed records of the studies say, and claim no more."""

from __future__ import annotations

import csv
import functools
import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.maths.intervals import paired, prediction
from calfat_plugin.registry import Registry
from calfat_plugin.report import theme
from calfat_plugin.report.charts import Chart, render
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import CHOICE, read_record
from tests.cli.runner import ROOT, calfat
from tests.docs.figures import check_figure
from tests.docs.pages import DOCS

PAGE, README = DOCS / "results.md", ROOT / "README.md"
RECORDS = sorted((DOCS / "results").glob("*_runs.csv"))
FRESH = sorted((DOCS / "results").glob("*_fresh.csv"))
STUDIES = [record.stem.removesuffix("_runs") for record in RECORDS]
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MARKED = re.compile(r"<!-- (\w+): (accuracies|comparisons) -->\n+((?:\|.*\n)+)")
SHOWN = [(page, *found) for page in (PAGE, README) for found in MARKED.findall(page.read_text(encoding="utf-8"))]
PAPER, REFERENCE, STANDARD = "0.1/CalFAT, the paper's constants", "0.1/FedPGD", "0.1/standard FL"

NAMES = {"study_fmnist": "Fashion-MNIST", "study_digits": "Digits"}  # in the order of the page's columns
SKEWED = "0.1"  # beta of the rows that README shows
SHORT = {"CalFAT, the paper's constants": "CalFAT", "CalFAT, the release's constants": "CalFAT, release"}

Rows = list[dict[str, str]]


def rows(table: str) -> Rows:
    """Heading to cell, row by row."""
    head, _, *body = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
    return [dict(zip(head, cells, strict=True)) for cells in body]


@dataclass(frozen=True)
class Published:
    """What ``calfat suite --table`` makes of a record; rows and comparisons without runs are left out."""

    accuracies: Rows
    comparisons: Rows
    cells: dict[str, dict[str, Any]]
    compared: dict[tuple[str, str], dict[str, Any]]

    def claim(self, endpoint: str) -> str:
        """CalFAT's difference to FedPGD in a primary endpoint, with its interval and the word that it may have."""
        of = self.compared[REFERENCE, endpoint]
        if of["difference"] is None:
            return "not run yet"
        interval = of["difference"]["interval"]  # none of shares of collapsed runs
        bounds = "" if interval is None else " [{:.1f}, {:.1f}]".format(*(100 * bound for bound in interval))
        return f"{100 * of['difference']['mean']:+.1f}{bounds}, {of['result']}"

    def exchanged(self, name: str) -> tuple[str, str]:
        """Endpoint 4 with the rate of exchange of standard FL's measured robustness, and over how many pairs."""
        runs = read_record(DOCS / "results" / f"{name}_runs.csv")
        natural, robust = ({cell: dict[int, float]() for cell in (PAPER, REFERENCE, STANDARD)} for _ in range(2))
        for (cell, tried, seed), run in runs.items():
            if not tried and cell in natural:
                natural[cell][seed], robust[cell][seed] = run.values["natural"], run.values["autoattack"]
        gain = {}
        for seed, reference in robust[REFERENCE].items():
            if (given_up := reference - robust[STANDARD][seed]) > 0:
                rate = (natural[STANDARD][seed] - natural[REFERENCE][seed]) / given_up
                led = natural[PAPER][seed] - natural[REFERENCE][seed]
                gain[seed] = led + rate * (robust[PAPER][seed] - reference)
        found = paired(gain, dict.fromkeys(gain, 0.0))
        assert found is not None
        assert found.interval is not None
        low, high = (100 * bound for bound in found.interval)
        return f"{100 * found.mean:+.1f} [{low:.1f}, {high:.1f}]", str(len(gain))

    @property
    def skewed(self) -> list[str]:
        """The methods whose rows under label skew have all their pairs."""
        return [row["method"] for row in self.accuracies if row["beta"] == SKEWED and row["n"] == "10"]

    def mean(self, cell: str, metric: str) -> str:
        return f"{100 * self.cells[cell]['scores'][metric]['mean']:.1f}"


@functools.cache
def published(name: str) -> Published:
    with tempfile.TemporaryDirectory() as folder:
        suite, record = str(ROOT / "suites" / f"{name}.yaml"), str(DOCS / "results" / f"{name}_runs.csv")
        shown = ("--record", record, "--table", "--json", "--out", folder)
        ended = calfat("suite", suite, *shown)
        assert ended.code == 0, ended.err
        first, _, *others = map(rows, TABLE.findall((Path(folder) / f"{name}.md").read_text(encoding="utf-8")))
    found = json.loads(ended.out)
    return Published(
        [row for row in first if row["n"] != "0"],
        [row for table in others for row in table if row["n"] != "-"],
        {cell["name"]: cell for cell in found["cells"]},
        {(of["cell"], of["endpoint"]): of for family in found["comparisons"] for of in family},
    )


def fresh_rows(name: str) -> Rows:
    """Values of pairs that were run after publication, against the prediction interval of the published ones."""
    published_runs, fresh = (read_record(DOCS / "results" / f"{name}_{kind}.csv") for kind in ("runs", "fresh"))
    found = []
    for cell in (PAPER, REFERENCE):
        for metric, heading in (("natural", "natural"), ("autoattack", "AA")):
            interval = prediction(
                [run.values[metric] for (of, tried, _), run in published_runs.items() if of == cell and not tried]
            )
            assert interval is not None
            values = {
                seed: run.values[metric] for (of, tried, seed), run in sorted(fresh.items()) if of == cell and not tried
            }
            inside = sum(interval.low <= value <= interval.high for value in values.values())
            found.append(
                {
                    "row": cell,
                    "accuracy": heading,
                    "95 % prediction interval": f"[{100 * interval.low:.1f}, {100 * interval.high:.1f}]",
                    **{str(seed): f"{100 * value:.1f}" for seed, value in values.items()},
                    "inside": f"{inside} of {len(values)}",
                }
            )
    return found


@pytest.mark.parametrize("record", RECORDS, ids=STUDIES)
def test_a_record_continues_its_suite(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is of a run that the suite has today, with the recipe that it has today."""
    monkeypatch.chdir(tmp_path)
    suite = load_suite(str(ROOT / "suites" / f"{record.stem.removesuffix('_runs')}.yaml"))
    plan = make_plan(replace(suite, record=record), Registry.load(entry_points=False))
    known = {run.key for run in (*plan.choosing.runs, *plan.runs) if run.recorded is not None}
    assert known == set(read_record(record))


def test_every_record_is_published() -> None:
    for page, kinds in ((PAGE, {"accuracies", "comparisons"}), (README, {"accuracies"})):
        assert {found[1:3] for found in SHOWN if found[0] == page} == {
            (name, kind) for name in STUDIES for kind in kinds
        }


@pytest.mark.parametrize(
    ("page", "name", "kind", "table"), SHOWN, ids=[f"{page.stem}-{name}-{kind}" for page, name, kind, _ in SHOWN]
)
def test_every_number_of_a_table_is_that_of_its_record(page: Path, name: str, kind: str, table: str) -> None:
    known = getattr(published(name), kind)
    shown = rows(table)
    if page == PAGE:
        assert shown == known
    else:  # fewer columns and rows
        assert shown == [{heading: row[heading] for heading in shown[0]} for row in known if row["beta"] == SKEWED]


@pytest.mark.parametrize("name", [path.stem.removesuffix("_fresh") for path in FRESH])
def test_fresh_pairs_lie_where_the_published_ones_predict(name: str) -> None:
    """At least nine of ten, in each accuracy, as the study says."""
    (table,) = re.findall(rf"<!-- {name}: fresh -->\n+((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert rows(table) == fresh_rows(name)
    for heading in ("natural", "AA"):
        counts = [int(row["inside"].partition(" ")[0]) for row in rows(table) if row["accuracy"] == heading]
        assert sum(counts) >= 9


def test_the_choice_of_rates_on_cifar10_is_that_of_its_record() -> None:
    (table,) = re.findall(r"<!-- study_cifar10: choice -->\n+((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"))
    expected: dict[tuple[str, int], dict[str, str]] = {}
    for (method, tried, seed), run in read_record(DOCS / "results" / "study_cifar10_choice.csv").items():
        row = expected.setdefault((method, seed), {"method": method, "pair": str(seed)})
        row[tried.removeprefix("learning_rate ")] = f"{100 * run.values[CHOICE]:.1f}"
    assert rows(table) == list(expected.values())


def test_the_curves_at_the_papers_size_are_those_of_their_runs() -> None:
    """The records are copies of the rounds.csv of the runs."""
    (table,) = re.findall(r"<!-- cifar10: rounds -->\n+((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"))
    expected = []
    for method in ("CalFAT", "FedPGD"):
        with (DOCS / "results" / f"cifar10_{method.lower()}_rounds.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                accuracies = [f"{100 * float(row[metric]):.1f}" for metric in ("natural", "pgd20")]
                spent = [f"{float(row[of]):.0f}" for of in ("seconds", "peak_memory_mb")]
                expected.append([method, row["round"], *accuracies, *spent])
    assert [list(row.values()) for row in rows(table)] == expected


def test_every_hypothesis_has_the_word_that_its_test_allows() -> None:
    """And every collapse is counted."""
    text = PAGE.read_text(encoding="utf-8")
    for hypothesis, endpoint in (
        ("H1", "natural:worst-class"),
        ("H2", "pgd20:worst-class"),
        ("H3", "autoattack"),
        ("H4", "natural at equal autoattack"),
        ("H5", "collapsed"),
        ("H6", "lead in natural, 0.1 minus IID"),
    ):
        (line,) = re.findall(rf"^\| {hypothesis} \|.*", text, re.MULTILINE)
        assert line.strip("| ").split(" | ")[2:] == [published(name).claim(endpoint) for name in NAMES]


def headline(figure: Any) -> None:
    """Natural accuracy of the worst class against accuracy under AutoAttack, with the intervals of both."""
    methods = dict.fromkeys(method for name in NAMES for method in published(name).skewed)
    for axes, (name, title) in zip(figure.subplots(1, len(NAMES)), NAMES.items(), strict=True):
        for index, method in enumerate(methods):
            style = {"color": theme.series(index), "marker": theme.marker(index), "elinewidth": 1, "capsize": 2}
            axes.errorbar(
                [], [], label=SHORT.get(method, method), linestyle="", **style
            )  # the legend is that of the first axes
            if method not in published(name).skewed:
                continue
            scores = published(name).cells[f"{SKEWED}/{method}"]["scores"]
            means, ends = [], []
            for metric in ("autoattack", "natural:worst-class"):
                mean, (low, high) = scores[metric]["mean"], scores[metric]["interval"]
                means.append(100 * mean)
                ends.append([[100 * (mean - low)], [100 * (high - mean)]])
            axes.errorbar(*means, xerr=ends[0], yerr=ends[1], linestyle="", **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("under AutoAttack (%)")
        if name == next(iter(NAMES)):
            axes.set_ylabel("worst class, natural (%)")
        axes.set_ylim(0, 100)
        axes.grid()


def test_readmes_figure_is_what_the_records_say(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    render(Chart("study", "The worst class, and all under attack", "", 2.4, headline), tmp_path)
    drawn = (tmp_path / "study.svg").read_text(encoding="utf-8")
    check_figure(README, "study.svg", drawn, update=request.config.getoption("--update-snapshots"))


HEADLINE = (
    "On Fashion-MNIST, the class that CalFAT's model knows worst keeps {calfat} % natural accuracy, and that of the "
    "model of FedPGD, which is adversarial training without calibration, {fedpgd} %: a clear difference. Under "
    "AutoAttack, ten runs each show neither that one of the two leads nor that they are level. On digits, no "
    "difference between the two is clear, and FedRBN, whose network alone has batch normalisation, is clearly ahead of "
    "CalFAT."
)


def test_readmes_headline_has_the_words_that_the_tests_allow() -> None:
    fmnist, digits = map(published, NAMES)
    metric = "natural:worst-class"
    said = HEADLINE.format(calfat=fmnist.mean(PAPER, metric), fedpgd=fmnist.mean(REFERENCE, metric))
    assert said in " ".join(README.read_text(encoding="utf-8").split())
    assert fmnist.compared[REFERENCE, metric]["result"] == "clear"
    assert fmnist.compared[REFERENCE, "autoattack"]["result"] == "not clear"
    assert {row["result"] for row in digits.comparisons if row["row"] == REFERENCE} == {"not clear"}
    release, fedrbn = f"{SKEWED}/CalFAT, the release's constants", f"{SKEWED}/FedRBN"
    clear = {(row["row"], row["endpoint"]) for row in digits.comparisons if row["result"] == "clear"}
    ahead = ("natural:worst-class", "pgd20:worst-class", "autoattack", "natural at equal autoattack")
    assert clear == {(release, "pgd20:worst-class"), *((fedrbn, endpoint) for endpoint in ahead)}
    assert all(digits.compared[each]["difference"]["mean"] < 0 for each in clear)  # none that CalFAT leads
    verdicts = {f"{row['beta']}/{row['method']}": row["calfat trust"] for row in digits.accuracies}
    assert verdicts[release].startswith("overstated by at least ")  # so the pages do not take it for robustness
    assert verdicts[fedrbn].startswith("holds ")
    assert {cell["scores"]["autoattack"]["n"] for cell in (fmnist.cells[each] for each in (PAPER, REFERENCE))} == {10}


# Whatever is said with an interval outside a table.
CLAIMS = {
    README: tuple(
        f"The worst class of CalFAT's model keeps {{{name}[calfat]}} % natural accuracy, that of FedPGD's "
        f"{{{name}[fedpgd]}} %: {{{name}[worst]}}. Under AutoAttack: {{{name}[autoattack]}}. "
        f"Natural accuracy at equal AutoAttack: {{{name}[exchanged]}}."
        for name in NAMES
    ),
    PAGE: (
        "it is {study_fmnist[standard]} % on Fashion-MNIST and {study_digits[standard]} % on digits. With the accuracy "
        "that it has, the differences are {study_fmnist[measured][0]} on Fashion-MNIST and, over the "
        "{study_digits[measured][1]} pairs in which it has less than FedPGD, {study_digits[measured][0]} on digits.",
    ),
}


@pytest.mark.parametrize("page", CLAIMS, ids=lambda page: page.stem)
def test_what_the_text_claims_follows_from_the_records(page: Path) -> None:
    figures = {
        name: {
            "calfat": of.mean(PAPER, "natural:worst-class"),
            "fedpgd": of.mean(REFERENCE, "natural:worst-class"),
            "worst": of.claim("natural:worst-class"),
            "autoattack": of.claim("autoattack"),
            "exchanged": of.claim("natural at equal autoattack"),
            "standard": of.mean(STANDARD, "autoattack"),
            "measured": of.exchanged(name),
        }
        for name, of in zip(NAMES, map(published, NAMES), strict=True)
    }
    text = " ".join(TABLE.sub("", page.read_text(encoding="utf-8")).split())
    claims = [claim.format(**figures) for claim in CLAIMS[page]]
    for claim in claims:
        assert claim in text
        text = text.replace(claim, "")
    assert re.findall(r"[+-]?\d+\.\d+ \[[^]]*\]", text) == []
