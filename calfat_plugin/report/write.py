"""Writing a page and its figures: for one run into its directory, for several where the user says."""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from calfat_plugin.disk import read_bytes, refuse_link, scratch_folder
from calfat_plugin.errors import RunError
from calfat_plugin.report.page import GENERATOR
from calfat_plugin.run_files import SUITE, SuiteFile, read_suite
from calfat_plugin.stored_run import Run

PAGE = "report.html"
FIGURES = "figures"

log = logging.getLogger(__name__)


def write_run_report(directory: Path, out: Path | None = None) -> Path:
    """Write the page of one run, finished or not."""
    from calfat_plugin.report.run_page import run_page

    run = Run.load(directory)
    return _write(out or directory / PAGE, lambda figures: run_page(run, figures), folder_is_ours=out is None)


def write_comparison(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page that sets runs side by side."""
    from calfat_plugin.report.comparison import MOST_LINES, comparison_page, find_runs, group_runs

    paths: dict[Path, None] = {}
    for directory in directories:
        for path in find_runs(directory):
            paths[path.resolve()] = None
    current_folder = Path.cwd()
    runs = []
    for path in paths:
        if path.is_relative_to(current_folder):  # shorter in messages and names
            path = path.relative_to(current_folder)
        runs.append(Run.load(path))
    begun = [run for run in runs if run.records or run.finished]
    if not begun:
        raise RunError(f"{directories[0]}: not one of the {len(runs)} runs here has finished a round yet.")
    root = directories[0] if len(directories) == 1 else None
    groups = group_runs(begun, root)
    notes = []
    if len(begun) < len(runs):
        notes.append(f"{len(runs) - len(begun)} of {len(runs)} runs have not finished a round and are left out.")
    repeats = len(begun) - sum(len(group.runs) for group in groups)
    if repeats:
        notes.append(f"{repeats} runs repeat a seed of the same recipe; of each seed the last finished run counts.")
    if len(groups) > MOST_LINES:
        notes.append(f"The charts show the first {MOST_LINES} of {len(groups)} settings.")
    title = " and ".join(group.name for group in groups)
    if len(groups) > 2:
        title = f"{groups[0].name} and {len(groups) - 1} others"
    suite = SuiteFile()
    if root is not None:
        suite = read_suite(root)
        title = suite.title or root.resolve().name
        notes += suite.notes
    of_suite = out is None and root is not None and (root / SUITE).exists()
    return _write(
        out or (root or Path()) / PAGE,
        lambda figures: comparison_page(title, groups, figures, suite=suite, notes=notes),
        folder_is_ours=of_suite,
    )


def try_report(
    write: Callable[[], Path], directory: Path, warn: Callable[[str], None], *, after: str = "", traceback: bool = False
) -> Path | None:
    """Write a page after the results were saved; if it fails, warn, and return None."""
    try:
        return write()
    except Exception as error:
        if traceback:
            log.exception("no report")
        problem = f"the report was not written ({type(error).__name__}: {error}){after}"
        warn(f"{problem}; try again with: calfat report {shlex.quote(str(directory))}")
        return None


def _write(out: Path, compose: Callable[[Path], str], *, folder_is_ours: bool) -> Path:
    """Draw into a temporary folder, then put page and figures in place; a failure leaves an older report as it was.

    It refuses to replace a page that calfat did not make. It also refuses a folder of figures without a page of
    calfat's beside it, unless calfat made the folder of the page (``folder_is_ours``).
    """
    if out.is_dir():
        raise RunError(f"{out}: is a directory; name a file, such as {out / PAGE}.")
    if out.exists() and f'content="{GENERATOR} ' not in read_bytes(out, 2000).decode(errors="replace"):
        raise RunError(f"{out}: there is a file that calfat did not make; choose another with --out.")
    # A page of another name has a folder of its own.
    final = out.with_name(FIGURES if out.name == PAGE else f"{out.stem}_{FIGURES}")
    if not (folder_is_ours or out.exists()) and final.is_dir() and not final.is_symlink() and any(final.iterdir()):
        raise RunError(
            f"{final}: the page's figures go there, and without {out} beside it, what it holds is not calfat's. Choose "
            "another page with --out, or move the folder away."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out.parent, ".report-") as temporary:
            figures = temporary / final.name
            figures.mkdir()
            page = temporary / out.name
            # The command may name a file whose name is no UTF-8.
            page.write_text(compose(figures), encoding="utf-8", errors="backslashreplace")
            refuse_link(final, "figures are written")
            final.mkdir(exist_ok=True)
            for file in figures.iterdir():
                shutil.move(file, final / file.name)
            page.replace(out)
    except OSError as error:
        raise RunError(f"{out}: the report cannot be written ({error.strerror or error}).") from None
    return out
