"""``calfat replay RUN_DIR``: check a finished evaluation by its adversarial images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from calfat_plugin.analyses.replay import Doubt, Replay, open_evidence, write_pictures
from calfat_plugin.analyses.replay import replay as check
from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import stop_signals
from calfat_plugin.cli.options import which_model
from calfat_plugin.progress import verbatim_console
from calfat_plugin.report.numbers import counted, percent
from calfat_plugin.report.table import Table, print_table

_NOT_SHOWN = 1  # exit code: a number does not stand
_LISTED = 10  # images that are named


@click.command()
@click.argument("target", metavar="RUN_DIR_OR_EVIDENCE", type=click.Path(path_type=Path))
@which_model
@click.option("--device", metavar="cpu|cuda:0", help="Default: as the recipe says.")
@click.option(
    "--png", "pictures", type=click.Path(path_type=Path), metavar="DIR", help="Write each image as PNG files, too."
)
@click.option(
    "--model-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask this file that `calfat export` wrote, a .pt2 or .onnx, in the model's place.",
)
@click.option("--eight-bit", is_flag=True, help="Round images to 8 bits a value before they are shown.")
@json_option
def replay(
    target: Path, as_json: bool, pictures: Path | None, model_file: Path | None, eight_bit: bool, **how: Any
) -> None:
    """Check the numbers of a finished evaluation by the adversarial images that it kept.

    Takes a run directory, or a file of evidence that `calfat attack` or `calfat trust` wrote. Every image is compared
    with data, ball and pixel range, and shown to the model again: seconds instead of the attack. Exit code 1: a number
    does not stand.
    """
    with stop_signals(), json_output(as_json) as show:
        run, evidence = open_evidence(target, **how)
        found = check(run, evidence, model_file=model_file, eight_bit=eight_bit, trust=how["trust"])
        console = verbatim_console()
        print_table(console, _table(found))
        for line in lines_of(found):
            console.print(line, soft_wrap=True)
        content = found.as_json()
        if pictures is not None:
            still = write_pictures(found, pictures)
            console.print(
                f"pictures: {pictures}; with 8 bits a value, {still} of {len(found.falls)} still fall", soft_wrap=True
            )
            content["fall_with_8_bits"] = still
        show(content)
    if not found.stands:
        sys.exit(_NOT_SHOWN)


def _table(found: Replay) -> Table:
    rows = []
    for one in found.numbers:
        counts = str(one.num_examples), str(one.checked)
        rows.append([one.label, percent(one.said), percent(one.shown), *counts, "yes" if one.stands else "no"])
    title = f"{counted(len(found.falls), 'adversarial image')} in {found.path}"
    return Table(title, ["evaluator", "said", "shown", "images", "checked", "stands"], rows)


def lines_of(found: Replay) -> list[str]:
    """What the table does not say."""
    facts, number = found.evidence.facts, len(found.falls)
    lines = [
        f"{int(found.falls.sum())} of {number} fall; all are in the {facts['norm']} ball of eps {facts['eps']}, in the "
        "pixel range, and of this data and these weights"
    ]
    if found.model_file is not None:
        asked = found.model_file
        lines.append(
            f"asked: {asked.path.name} in {asked.runtime}; logits are within {found.difference:.1e} of the model's own"
        )
    if found.eight_bit:
        lines.append("images were rounded to 8 bits a value before they were shown")
    if found.without:
        lines.append(f"no evidence is kept of: {', '.join(found.without)}")
    borderline = [doubt for doubt in found.doubts if doubt.borderline]
    if borderline:
        lines.append(
            f"{counted(len(borderline), 'borderline image')} may differ between processors: {_named(borderline)}; no "
            "number falls by them"
        )
    for what, text in _DOUBTS.items():
        doubts = [doubt for doubt in found.doubts if doubt.what == what and not doubt.borderline]
        if doubts:
            lines.append(f"{counted(len(doubts), 'image')} {text}: {_named(doubts)}")
    return lines


_DOUBTS = {
    "clean": "of which the model says another class than the evidence when clean",
    "falls": "whose adversarial image does not fall",
    "missing": "said to fall, of which no adversarial image is there",
}


def _named(doubts: list[Doubt]) -> str:
    names = [f"{doubt.image} ({doubt.attack})" if doubt.attack else str(doubt.image) for doubt in doubts[:_LISTED]]
    return ", ".join(names) + (", ..." if len(doubts) > _LISTED else "")
