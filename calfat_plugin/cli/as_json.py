"""``--json``: standard output is one JSON document; what a command prints while it works goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for other programs.")


@contextmanager
def json_output(wanted: bool) -> Iterator[Callable[[Any], None]]:
    """Keep standard output for the result, if one is wanted; gives a function that prints it, or else does nothing."""
    stdout = sys.stdout

    def show(result: Any) -> None:
        if wanted:
            print(json.dumps(result, indent=2, allow_nan=False), file=stdout)

    with redirect_stdout(sys.stderr) if wanted else nullcontext():
        yield show
