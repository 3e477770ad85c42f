"""``calfat export RUN_DIR``: a model that leaves this package, with its card, checked against its evidence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from calfat_plugin.cli.errors import stop_signals, warn
from calfat_plugin.cli.options import download_option, json_option, json_output, which_checkpoint
from calfat_plugin.cli.trust import lines_of
from calfat_plugin.exporting.folder import Export, write_export
from calfat_plugin.progress import choose_progress, verbatim_console

_FALLEN = 1  # exit code: a number does not stand on an exported file


@click.command()
@click.argument("target", metavar="CHECKPOINT_OR_RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new folder. Default: export in the run directory.",
)
@click.option(
    "--card",
    "notes",
    type=click.Path(path_type=Path),
    metavar="FILE.md",
    help="Your own text for the card: intended use, limits.",
)
@which_checkpoint
@download_option
@json_option
def export(target: Path, folder: Path | None, notes: Path | None, as_json: bool, **how: Any) -> None:
    """Write a trained model as files that other programs load without this package, with a card.

    The folder gets model.safetensors, model.pt2 (PyTorch), model.onnx (with the extra onnx), config.json, README.md
    (the card) and provenance.json. At the end, the adversarial images that the run kept are shown to the exported
    files. Exit code 1: a number does not stand on one of them.
    """
    with stop_signals(), json_output(as_json) as show:
        console = verbatim_console()
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        with choose_progress(console, plain=True) as progress:
            written = write_export(target, folder, notes=notes, command=command, observer=progress, **how)
        for line in _lines(written):
            console.print(line, soft_wrap=True)
        for file, why in written.left_out.items():
            warn(f"{file} is left out: {why}")
        show(written.as_json())
    if not written.stands:
        sys.exit(_FALLEN)


def _lines(written: Export) -> list[str]:
    """What was written, and what the replay on each file found."""
    lines = [f"exported: {written.folder} ({', '.join(written.files)})"]
    for name, replayed in written.replayed.items():
        fallen = [number.label for number in replayed.exact.numbers if not number.stands]
        verdict = f"these numbers do not stand: {', '.join(fallen)}" if fallen else "every number stands"
        lines.append(f"{name}: {verdict}")
        for line in lines_of(replayed.exact):
            lines.append(f"  {line}")
        eight_bit = replayed.eight_bit
        lines.append(f"  with 8 bits a value, {int(eight_bit.falls.sum())} of {len(eight_bit.falls)} fall")
    if written.not_replayed:
        lines.append(f"the evidence was not shown to the files: {written.not_replayed}")
    return lines
