"""``python -m calfat_plugin``: the same as ``calfat``, whose script may not be on the PATH."""

from __future__ import annotations

from calfat_plugin.cli.main import main

if __name__ == "__main__":
    main(prog_name="calfat")
