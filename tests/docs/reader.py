"""A reader who follows a page in a folder of its own: saves its files, types its commands, runs its programs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.runner import RECIPES, calfat
from tests.docs.pages import Block

_TINY = (
    *("--set", "train_args.comm_round=1", "--set", "calfat.threat.steps=1"),
    *("--set", "data_args.max_train_examples=200", "--set", "data_args.max_test_examples=20"),
)  # after `calfat run`; what the page itself sets comes later, and so is in force


class Reader:
    """Follows one page, block by block.

    Args:
        folder: becomes the current one.
        monkeypatch: undoes what changes in this process.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self._recipe = RECIPES / "calfat_digits.yaml"
        monkeypatch.chdir(folder)
        monkeypatch.setattr("calfat_plugin.report.write_run_report", lambda path: path)
        monkeypatch.setattr("calfat_plugin.report.charts.FORMATS", {})  # figures on pages, none beside them

    def follow(self, block: Block) -> None:
        """Do what one block says."""
        if block.saved:
            (self._folder / block.saved).write_text(block.text, encoding="utf-8")
            if block.language == "yaml" and "calfat" in yaml.safe_load(block.text):
                self._recipe = self._folder / block.saved
        elif block.language == "sh":
            for line in block.text.splitlines():
                self._type(line)
        elif block.language == "yaml":
            self._check(yaml.safe_load(block.text))
        else:
            assert block.language == "python", f"nothing is known about a block of {block.language or 'no language'}"
            with self._new_process(self._folder):
                exec(compile(block.text, "page", "exec", dont_inherit=True), {"__name__": "page"})

    def _type(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        if words[0] == "cd":
            os.chdir(words[1])  # the first change was the fixture's, which goes back
            return
        path = [self._folder / words.pop(0).partition("=")[2]] if line.startswith("PYTHONPATH=") else []
        assert words.pop(0) == "calfat", f"nothing is known about the command {line}"
        with self._new_process(*path):
            ended = calfat(*(("run", *_TINY, *words[1:]) if words[0] == "run" else words))
        assert ended.code == 0, f"{line}\n{ended.out}{ended.err}"

    @contextmanager
    def _new_process(self, *path: Path) -> Iterator[None]:
        """As if it were one: modules of ``path`` can be imported, and nothing of this folder has been."""
        before = set(sys.modules)
        with self._monkeypatch.context() as patch:
            for folder in path:
                patch.syspath_prepend(str(folder.resolve()))
            yield
        for name in set(sys.modules) - before:
            if Path(str(vars(sys.modules[name]).get("__file__"))).is_relative_to(self._folder):
                del sys.modules[name]

    def _check(self, keys: dict[str, dict[str, Any]]) -> None:
        """Keys of a recipe that the page shows by themselves, put into the one that it is about."""
        whole = yaml.safe_load(self._recipe.read_text(encoding="utf-8"))
        for section, values in keys.items():
            whole[section] = {**whole.get(section, {}), **values}
        path = self._folder / "shown.yaml"
        path.write_text(yaml.safe_dump(whole), encoding="utf-8")
        ended = calfat("check", "--strict", str(path))
        assert ended.code == 0, f"{keys}\n{ended.err}"
