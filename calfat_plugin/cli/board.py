"""``calfat board``: a leaderboard that checks its entries itself."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from calfat_plugin.board.own import Means
from calfat_plugin.board.tracks import Board, make_board, open_board
from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import stop_signals
from calfat_plugin.cli.options import Decorator, together
from calfat_plugin.cli.progress import choose_progress, verbatim_console
from calfat_plugin.errors import OptionError
from calfat_plugin.report.numbers import counted, percent
from calfat_plugin.runs.compute import check_device

_DOES_NOT_STAND = 1  # exit code

_board_argument: Decorator = click.argument("board", metavar="BOARD", type=click.Path(path_type=Path))
#: What a verifier computes with.
_means = together(
    click.option("--data-dir", metavar="DIR", help="Where data sets are, whatever an entry says. Default: ~/data."),
    click.option("--download", is_flag=True, help="Fetch a missing data set."),
    click.option("--device", metavar="cpu|cuda:0", help="Default: cpu."),
    click.option(
        "--trust-plugins",
        "trusted",
        metavar="MODULE",
        multiple=True,
        help="Execute the entry's plugins/MODULE.py; repeatable. Read it first: it acts with your permissions.",
    ),
)


@click.group()
def board() -> None:
    """Keep a leaderboard that checks its entries itself.

    A board is a folder: it lives in a git repository, an entry or a challenge is a pull request, and CI runs verify.
    """


@board.command(short_help="Make a board.")
@_board_argument
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--track", default="main", show_default=True, help="Name of its first track.")
def init(board: Path, run: Path, track: str) -> None:
    """Make a board whose first track is for recipes that are measured as that of RUN: data, partition, eps, network."""
    make_board(board, run, track)
    click.echo(
        f"{board}: board.yaml with the track '{track}', and .github/workflows/verify.yml. Edit them, commit them."
    )


@board.command(short_help="Enter finished runs.")
@_board_argument
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Name of the entry.")
@click.option("--track", help="Track of the entry. Default: the only one.")
@click.option("--by", default="", help="Who made it.")
@json_option
def add(board: Path, runs: tuple[Path, ...], name: str, track: str | None, by: str, as_json: bool) -> None:
    """Copy finished and judged runs of one recipe, at least five seeds, into BOARD as an entry."""
    from calfat_plugin.board.entry import add as add_entry
    from calfat_plugin.board.standing import standing

    with stop_signals(), json_output(as_json) as show:
        here = open_board(board)
        entry = add_entry(here, _track(here, track), name, by, runs)
        found = standing(entry)
        worst = percent(found.score("worst").mean or 0.0)
        print(f"{entry.folder}: {counted(len(entry.seeds), 'seed')}, worst case {worst}")
        print("It has not been verified yet:", shlex.join(["calfat", "board", "verify", str(board)]))
        show({"entry": str(entry.folder), "standing": found.as_json()})


@board.command(short_help="Check entries.")
@_board_argument
@click.argument("entry", metavar="[ENTRY]", required=False)
@click.option("--from-start", is_flag=True, help="Train every round again, not the last two alone.")
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    help="How far what is trained again may end from the entry's weights, as a share of the way that it moved them. "
    "0: the same bits, which the entrant's kind of processor gives. Default: twice as far as two arithmetics of this "
    "processor end apart, which is measured where the bits differ.",
)
@_means
@json_option
def verify(board: Path, entry: str | None, from_start: bool, within: float | None, as_json: bool, **means: Any) -> None:
    """Check one entry, or all: digests, evidence, attacks, training.

    Needs no trust in the entrant, and executes nothing of theirs. Exit code 1: an entry does not stand.
    """
    from calfat_plugin.board.verify import verify as check

    if within is not None and not math.isfinite(within):
        raise OptionError(f"--within {within}: expected a number, 0 or more.")
    with stop_signals(), json_output(as_json) as show:
        here, own, console = open_board(board), _checked(**means), verbatim_console()
        chosen = here.entries() if entry is None else [here.find(entry)]
        done = []
        for track, name in chosen:
            with choose_progress(console, plain=True) as progress:
                done.append(check(here, track, name, own, progress, from_start=from_start, within=within))
            verdict = "stands" if done[-1].stands else "does not stand"
            console.print(f"{track}/{name}: {verdict} (revision {done[-1].revision[:12]})", soft_wrap=True)
        if not chosen:
            console.print(f"{board}: there is no entry yet.")
        show([each.as_json() for each in done])
    if not all(each.stands for each in done):
        sys.exit(_DOES_NOT_STAND)


@board.command(short_help="Lower an entry.")
@_board_argument
@click.argument("entry", metavar="ENTRY")
@click.option(
    "--evidence", required=True, type=click.Path(path_type=Path), help="What calfat attack or calfat trust wrote."
)
@click.option("--by", required=True, metavar="NAME", help="Who challenges.")
@_means
@json_option
def challenge(board: Path, entry: str, evidence: Path, by: str, as_json: bool, **means: Any) -> None:
    """Lower an entry with adversarial images of yours, which are checked with one forward pass."""
    from calfat_plugin.board.challenge import challenge as lower

    with stop_signals(), json_output(as_json) as show:
        here = open_board(board)
        before, after = lower(here, *here.find(entry), evidence, by, _checked(**means))
        shares = [percent(each.score("worst").mean or 0.0) for each in (before, after)]
        print(f"{entry}: worst case {shares[0]} before, {shares[1]} now, by {after.challengers[by]} images of {by}")
        show({"before": before.as_json(), "after": after.as_json()})


@board.command(short_help="Write the page.")
@_board_argument
@click.option("--out", type=click.Path(path_type=Path), help="Default: BOARD/index.html.")
def page(board: Path, out: Path | None) -> None:
    """Write the page of a board: a row an entry, by best-known worst case."""
    from calfat_plugin.board.page import write_page

    click.echo(f"page: {write_page(open_board(board), out)}")


def _track(here: Board, track: str | None) -> str:
    if track is None and len(here.tracks) == 1:
        return next(iter(here.tracks))
    if track is None or track not in here.tracks:
        raise OptionError(
            f"--track {track or 'TRACK'}: the tracks of {here.path} are {', '.join(here.tracks)}; name one."
        )
    return track


def _checked(**means: Any) -> Means:
    if means["device"] is not None:
        check_device(means["device"], "--device")
    return Means(**means)
