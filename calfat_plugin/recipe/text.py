"""The text of a recipe file, wherever it comes from."""

from __future__ import annotations

from pathlib import Path

from calfat_plugin.disk import read_bytes
from calfat_plugin.errors import RecipeError, did_you_mean, short
from calfat_plugin.shipped import shipped_files

_MAX_BYTES = 256_000  # a recipe is a page of text; what goes beyond is another kind of file


def read_text(path: Path, kind: str) -> str:
    """The text of a recipe or a suite (``kind``), from a file, a device or a pipe; in UTF-8, perhaps with its mark."""
    shown = str(path)
    try:
        if path.is_dir():
            inside = sorted(child.name for child in path.glob("*.y*ml") if child.is_file())
            hint = f" Did you mean {path / inside[0]}?" if inside else ""
            raise RecipeError(f"{shown}: this is a directory, expected a {kind} file.{hint}")
        content = read_bytes(path, _MAX_BYTES)
    except FileNotFoundError:
        raise RecipeError(f"{shown}: no such file.{_instead_of(path)}") from None
    except OSError as error:
        raise RecipeError(f"{short(shown, 120)}: cannot be read ({error.strerror}).") from None
    if len(content) > _MAX_BYTES:
        size = path.stat().st_size or f"more than {_MAX_BYTES}"  # a pipe has no size
        raise RecipeError(f"{shown}: {size} bytes are too many for a {kind} ({_MAX_BYTES // 1000} kB at most).")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{shown}:{line}: byte {error.start} is not UTF-8 text; expected a YAML {kind}, not a binary file."
        ) from None


def _instead_of(path: Path) -> str:
    """What a missing file was probably meant to be: one beside it, or one that comes with the package."""
    near = [str(child) for child in path.parent.glob("*.y*ml") if child.is_file()]
    shipped = shipped_files()
    if not near and path.stem in shipped:
        return f" The one that comes with the package is called '{path.stem}', without a folder and an ending."
    if path.name == str(path) and not path.suffix:  # written as a name
        return did_you_mean(str(path), [*near, *shipped]) or " 'calfat recipes' lists what comes with the package."
    return did_you_mean(str(path), near)
