"""Real distributions in a folder: what pip would have left there, without pip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent


def install(
    folder: Path, name: str, version: str, modules: dict[str, str], requires: Sequence[str] = (), **plugins: str
) -> None:
    """Lay a distribution out in ``folder``, to be put on the search path.

    Args:
        folder: a site-packages.
        name, version: of the distribution.
        modules: module name to source.
        requires: what it depends on, such as ``calfat-plugin>=99``.
        plugins: entry points of the group ``calfat_plugin``, ``_`` in their names standing for ``-``.
    """
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(dedent(source))
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needed = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
    points = "".join(f"{point.replace('_', '-')} = {target}\n" for point, target in plugins.items())
    (info / "entry_points.txt").write_text(f"[console_scripts]\n\n[calfat_plugin]\n{points}")
