"""The host's own command line, for everything that our ``fedml`` command does not take itself; imports no torch."""

from __future__ import annotations

import warnings


def main() -> None:
    """Run the host's ``fedml`` with this process's arguments."""
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    from fedml.cli.cli import cli

    cli()
