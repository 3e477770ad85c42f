"""Whole texts that tests expect: one file of ``tests/snapshots/`` for a test file, one entry for a test.

``pytest FILE --update-snapshots`` writes what the tests of FILE came to, and drops the entries that no test has;
whoever updates reads the diff. What must not change unseen (an error's class, the file, the key) a test asserts beside.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

COLLECTED = pytest.StashKey[dict[Path, list[str]]]()  # the tests of each file, where whole files were asked for
PASSED = pytest.StashKey[bool]()


class _Dumper(yaml.SafeDumper):
    pass


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="write the texts of tests/snapshots anew (no -n)")


def _entry_of(item: pytest.Item) -> str:
    """With its class, if it has one: ``TestStepSize::test_eps[0.1]``."""
    return item.nodeid.partition("::")[2]


def note_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """To be called before any test is deselected: what is collected of a file is all that it has."""
    found = config.stash.setdefault(COLLECTED, {})
    if not any("::" in argument for argument in config.args):
        for item in items:
            found.setdefault(item.path, []).append(_entry_of(item))


def note_outcome(item: pytest.Item, report: pytest.TestReport) -> None:
    if report.when == "call":
        item.stash[PASSED] = report.passed


class TextSnapshot:
    """The entry of one test: its texts in their order; ``expected`` is None where they are being written."""

    def __init__(self, expected: list[str] | None, hidden: dict[str, str]) -> None:
        self.expected, self._hidden = expected, hidden
        self.given: list[str] = []

    def __call__(self, text: str, **hidden: object) -> None:
        """``text`` is the next one of this test; in the file, what is ``hidden`` has its name, as ``tmp_path`` has."""
        names = {**{str(value): name for name, value in hidden.items()}, **self._hidden}
        for value in sorted(names, key=len, reverse=True):
            text = text.replace(value, f"{{{names[value]}}}")
        self.given.append(text)
        if self.expected is not None:
            index = len(self.given)
            assert index <= len(self.expected), f"not in the snapshot (--update-snapshots writes it):\n{text}"
            lines = difflib.ndiff(self.expected[index - 1].splitlines(), text.splitlines())
            assert text == self.expected[index - 1], "\n".join(["not the text of the snapshot:", *lines])

    @contextmanager
    def raises(self, error: type[BaseException], *parts: object, **hidden: object) -> Iterator[None]:
        """An error of this class is raised, and its text, with ``parts`` in it, is the next one of this test."""
        with pytest.raises(error) as raised:
            yield
        for part in parts:
            assert str(part) in str(raised.value), f"{str(part)!r} is not in: {raised.value}"
        self(str(raised.value), **hidden)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Iterator[TextSnapshot]:
    tests, name = request.config.rootpath / "tests", _entry_of(request.node)
    file = tests / "snapshots" / request.path.relative_to(tests).with_suffix(".yaml")
    stored = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.exists() else {}
    collected = request.config.stash[COLLECTED].get(request.path, [])
    update = request.config.getoption("--update-snapshots")
    if unused := collected and not update and stored.keys() - set(collected):
        pytest.fail(f"{file} has entries of no test (--update-snapshots drops them): {sorted(unused)}")
    entry = stored.get(name, [])
    hidden = {str(request.getfixturevalue("tmp_path")): "tmp_path"} if "tmp_path" in request.fixturenames else {}
    shot = TextSnapshot(None if update else [entry] if isinstance(entry, str) else entry, hidden)
    yield shot
    if not request.node.stash.get(PASSED, False):
        return
    if shot.expected is not None:
        assert len(shot.given) == len(shot.expected), "the snapshot has texts that the test did not come to"
        return
    assert not hasattr(request.config, "workerinput"), "--update-snapshots writes files: run it without -n"
    stored[name] = shot.given[0] if len(shot.given) == 1 else shot.given
    stored = {key: stored[key] for key in collected or stored if stored.get(key, []) != []}
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.dump(stored, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    file.write_text(text, encoding="utf-8")
