"""Where pages go, what is kept, and what a run's end makes of a report that fails."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from calfat_plugin.errors import RunError
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe.document import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.report import run_page as run_page_module
from calfat_plugin.report import try_report, write_comparison, write_run_report
from calfat_plugin.report.charts import Chart, legend_name, render
from calfat_plugin.runs.directory import RunDirectory
from tests.cli.runner import ROOT, calfat, refused
from tests.environment import bare
from tests.report.made import made_run
from tests.snapshot import TextSnapshot

FINAL = {"natural": 0.6, "pgd20": 0.3}


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("two\nlines.yaml", "two_lines"),
        ("\x1b[31mred.yaml", "_[31mred"),
        ("\udcff.yaml", "_"),  # how Python has a byte that is no UTF-8
        ("a\\b.yaml", "a_b"),
        ("..yaml", "recipe"),
        ("größe 1.yaml", "größe 1"),
    ],
)
def test_a_run_can_be_read_whatever_its_recipes_file_is_called(file: str, name: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", final=FINAL, name=file)
    again = assemble(read_document(run / "recipe.yaml"), Registry.load(entry_points=False))
    assert again.name == name
    RunDirectory(run).check_same(again)
    assert write_run_report(run).exists()


@pytest.mark.usefixtures("no_figures")
def test_a_page_goes_beside_its_runs_or_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, trainer in (("all/a", "calfat"), ("all/b", "fedpgd")):
        made_run(Path(name), f"calfat.trainer={trainer}", final=FINAL)
    for words, page, shown in (
        (["all/a"], "all/a/report.html", "<h1>"),
        (["all"], "all/report.html", "2 settings, 2 runs"),
        (["all/a", "all/b"], "report.html", "<h1>calfat.trainer calfat and calfat.trainer fedpgd</h1>"),
        (["all/a", "all/b", "--out", "pages/two.html"], "pages/two.html", "2 settings, 2 runs"),
    ):
        assert calfat("report", *words) == (0, f"report: {page}\n", "")
        assert shown in Path(page).read_text()
    assert sorted(path.name for path in Path("pages").iterdir()) == ["two.html", "two_figures"]


@pytest.mark.usefixtures("no_figures")
def test_a_page_that_is_not_ours_is_kept(tmp_path: Path, snapshot: TextSnapshot) -> None:
    run = made_run(tmp_path / "a", final=FINAL)
    (run / "report.html").write_text("<h1>my thesis</h1>")
    for words in ((), ("--out", str(tmp_path))):  # a directory
        ended = calfat("report", run, *words)
        assert (ended.code, ended.out) == (2, "")
        snapshot(ended.err)
    assert (run / "report.html").read_text() == "<h1>my thesis</h1>"


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("out", "figures"), [("report.html", "figures"), ("two.html", "two_figures")])
def test_figures_that_are_not_ours_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, figures: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, trainer in (("a", "calfat"), ("b", "fedpgd")):
        made_run(Path(name), f"calfat.trainer={trainer}", final=FINAL)
    Path(figures).mkdir()
    assert calfat("report", "a", "b", "--out", out) == (0, f"report: {out}\n", "")  # an empty folder is nobody's
    mine = Path(figures, "natural.svg")
    mine.write_text("mine")
    assert calfat("report", "a", "b", "--out", out) == (0, f"report: {out}\n", "")  # beside a page, calfat's
    Path(out).unlink()
    assert calfat("report", "a", "b", "--out", out) == refused(
        f"{figures}: the page's figures go there, and without {out} beside it, what it holds is not calfat's. "
        "Choose another page with --out, or move the folder away."
    )
    assert mine.read_text() == "mine"
    assert not Path(out).exists()


def test_a_report_that_fails_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    run = made_run(tmp_path / "a", final=FINAL)
    before = write_run_report(run).read_bytes()
    monkeypatch.setattr(run_page_module, "run_page", Mock(side_effect=ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        write_run_report(run)
    assert (run / "report.html").read_bytes() == before
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("leads_somewhere", [True, False])
def test_a_link_in_the_place_of_the_figures_is_not_followed(tmp_path: Path, leads_somewhere: bool) -> None:
    run = made_run(tmp_path / "a", final=FINAL)
    elsewhere = tmp_path / "elsewhere"
    if leads_somewhere:
        elsewhere.mkdir()
    (run / "figures").symlink_to(elsewhere)
    ended = calfat("report", run)
    assert (ended.code, ended.err.startswith(f"error: {run / 'figures'}: is a link")) == (2, True)
    assert elsewhere.exists() == leads_somewhere
    assert not leads_somewhere or list(elsewhere.iterdir()) == []
    assert not (run / "report.html").exists()


def test_runs_that_have_not_begun_are_left_out_with_a_word(
    tmp_path: Path, no_figures: None, snapshot: TextSnapshot
) -> None:
    for seed in (0, 1):
        made_run(tmp_path / str(seed), f"common_args.random_seed={seed}", final=FINAL)
    for name in ("results.json", "rounds.jsonl", "rounds.csv"):
        (tmp_path / "1" / name).unlink()
    page = write_comparison([tmp_path]).read_text()
    assert "1 of 2 runs have not finished a round and are left out." in page
    for name in ("results.json", "rounds.jsonl", "rounds.csv"):
        (tmp_path / "0" / name).unlink()
    with snapshot.raises(RunError):
        write_comparison([tmp_path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", final=FINAL)
    run.chmod(0o500)
    with pytest.raises(RunError, match="the report cannot be written"):
        write_run_report(run)


def test_drawing_leaves_an_empty_home_empty_and_needs_no_torch(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a")
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import sys; from pathlib import Path; from calfat_plugin.report import write_run_report; "
        f"write_run_report(Path({str(run)!r})); print(sorted({{'torch', 'fedml'}} & set(sys.modules)))"
    )
    environment = bare(HOME=str(home), PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert list(home.iterdir()) == []
    assert (run / "figures" / "learning_curves.svg").exists()


@pytest.mark.filterwarnings("error")
def test_many_long_names_leave_a_figure_its_room(tmp_path: Path) -> None:
    """The legend is inside the figures; matplotlib warns, and draws over it, where nothing is left for the axes."""
    names = [f"0.05 · CalFAT, the paper's constants, and options that nobody would write down, {n}" for n in range(16)]
    drawing = render(Chart("crowded", "Crowded", "", 2.6, lines(*names)), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["crowded.pdf", "crowded.png", "crowded.svg"]
    svg = ElementTree.fromstring(base64.b64decode(drawing.source.partition(",")[2]))
    words = " ".join("".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text"))
    assert all(name in words for name in names)
    assert float(svg.attrib["height"].removesuffix("pt")) > 72 * 2.6 + 32 * 9  # two rows each, nine points high


def test_the_files_of_a_figure_are_the_same_twice(tmp_path: Path) -> None:
    chart = Chart("lines", "Lines", "", 2.6, lines("a", "b"))
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    assert render(chart, folders[0]) == render(chart, folders[1])
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
    assert first.keys() == {"lines.svg", "lines.pdf", "lines.png"}


@pytest.mark.filterwarnings("error")
def test_a_legend_has_every_name_as_it_is(tmp_path: Path) -> None:
    """matplotlib would leave out names that begin with an underscore, and read formulas between dollar signs."""
    render(Chart("nasty", "$\\frac$", "", 2.6, lines("_hidden", "$\\frac$", "<b>&amp;")), tmp_path)
    svg = ElementTree.parse(tmp_path / "nasty.svg")
    words = ["".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert set(words) > {"_hidden", "$\\frac$", "<b>&amp;"}
    assert words.count("$\\frac$") == 2


def lines(*names: str) -> Callable[[Figure], None]:
    """A line for each name."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name in names:
            axes.plot([0, 1], label=legend_name(name))

    return draw


def test_a_page_after_the_results_fails_with_a_warning(
    tmp_path: Path, no_figures: None, caplog: pytest.LogCaptureFixture
) -> None:
    run = made_run(tmp_path / "a", final=FINAL)
    assert try_report(lambda: write_run_report(run), run, pytest.fail) == run / "report.html"
    (run / "report.html").write_text("<h1>my thesis</h1>")
    warnings: list[str] = []
    assert try_report(lambda: write_run_report(run), run, warnings.append) is None
    assert caplog.records == []
    safe = ". The results are complete"
    assert try_report(lambda: write_run_report(run), run, warnings.append, after=safe, traceback=True) is None
    assert [record.exc_info is not None for record in caplog.records] == [True]
    what = f"the report was not written (RunError: {run / 'report.html'}: there is a file that calfat did not make; "
    again = f"; try again with: calfat report {run}"
    assert warnings == [f"{what}choose another with --out.){said}{again}" for said in ("", safe)]
