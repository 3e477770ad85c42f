"""No test trains a model and then asserts how good or how robust it became: processors round differently.

Found by reading: a test that trains, itself or through fixtures and helpers, and that asserts an inequality, a number
or a verdict about accuracy or loss, in its own lines or in those of what it calls. Networks to attack are in
``stored_models.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from tests.stored_models import NOISE, stored_model

ROOT = Path(__file__).parents[1]
QUALITY = re.compile(
    r"accura|robust|natural|pgd|fgsm|autoattack|correct|verdict|worst|claimed|clean|loss|broke|survi", re.IGNORECASE
)
VERDICTS = {"holds", "overstated", "not robust", "not shown"}
STARTS = {"fit", "step", "simulate", "start_all"}  # methods: of a trainer, an optimiser, federations of tests/silo
COMMANDS = {"run", "suite"}

#: Asserts about trained models that are true of every model, however its training ended.
TRUE_OF_EVERY_MODEL = {
    "tests/api/test_runs.py: 0 <= worst.accuracy <= 1": "the range of an accuracy",
    "tests/runs/test_outputs.py: fgsm['accuracy'] <= min(natural['accuracy'], fgsm['accuracy_release'])": (
        "what counts as robust is right on the clean image, too"
    ),
    "tests/suites/test_trust.py: [[run['verdict'] for run in cell['runs']] for cell in cells] == "
    "[['holds', None], [None, None]]": "the test wrote the verdict",
    "tests/suites/test_trust.py: [(row['cell'], row['seed'], row['verdict']) for row in recorded] == "
    "[('CalFAT', '0', 'holds'), ('CalFAT', '1', '')]": "the test wrote the verdict",
}


class Place(NamedTuple):
    """A name at the top level of a module."""

    module: str
    name: str


class Offence(NamedTuple):
    """An assertion about a model that was trained."""

    test: Place
    file: str
    text: str
    trained: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text} ({self.test.name} trains in {self.trained})"


class Sources:
    """Python files below a folder of tests, and what their functions refer to."""

    def __init__(self, root: Path, folder: str = "tests") -> None:
        paths = sorted((root / folder).rglob("*.py"))
        self.files = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
        self.trees = {module: ast.parse(path.read_text()) for module, path in self.files.items()}
        self.root = root

    @cached_property
    def definitions(self) -> dict[str, dict[str, ast.AST]]:
        """Module to its functions, classes and constants by name."""
        found: dict[str, dict[str, ast.AST]] = {}
        for module, tree in self.trees.items():
            here = found[module] = {}
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    here[node.name] = node
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    here |= {
                        name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                    }
        return found

    @cached_property
    def imports(self) -> dict[str, dict[str, str]]:
        """Module to the dotted names, below the same folder, of what it imports."""
        return {
            module: {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for module, tree in self.trees.items()
        }

    def place(self, module: str, name: str) -> Place | None:
        """Where a name of a module is defined; None: outside of these files, or it is a module."""
        if name in self.definitions.get(module, {}):
            return Place(module, name)
        source, _, imported = self.imports.get(module, {}).get(name, "").rpartition(".")
        return self.place(source, imported) if source else None

    def fixture(self, module: str, name: str) -> Place | None:
        """The fixture that a parameter of this name gets."""
        folders = module.split(".")[:-1]
        conftests = [".".join((*folders[:depth], "conftest")) for depth in range(len(folders), 0, -1)]
        return next((found for each in (module, *conftests) if (found := self.place(each, name))), None)

    def referred(self, place: Place) -> Iterator[Place]:
        """What a definition mentions: names, attributes of imported modules, fixtures."""
        module = place.module
        for node in ast.walk(self.definitions[module][place.name]):
            found = None
            if isinstance(node, ast.Name):
                found = self.place(module, node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found = self.place(self.imports[module].get(node.value.id, ""), node.attr)
            elif isinstance(node, ast.arg):
                found = self.fixture(module, node.arg)
            if found:
                yield found

    def reached(self, start: Place) -> dict[Place, None]:
        """A definition and all that it leads to, in order."""
        found, waiting = {}, [start]
        while waiting:
            place = waiting.pop()
            if place not in found:
                found[place] = None
                waiting += self.referred(place)
        return found

    def offences(self) -> Iterator[Offence]:
        """Assertions about quality in tests that train."""
        tests = [
            Place(module, name)
            for module, here in self.definitions.items()
            for name in here
            if re.match("test_|Test", name)
        ]
        for test in tests:
            reached = self.reached(test)
            trained = next((place for place in reached if trains(self.definitions[place.module][place.name])), None)
            for place in reached if trained else ():
                for text in judgements(self.definitions[place.module][place.name]):
                    yield Offence(test, str(self.files[place.module].relative_to(self.root)), text, trained.name)


def trains(definition: ast.AST) -> bool:
    """Whether it calls what trains, or has the words of a command that does."""
    for node in ast.walk(definition):
        words: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in STARTS or called in ("calfat.run", "calfat_plugin.run"):
                return True
            words = node.args if called not in ("Path", "getattr") else []
        elif isinstance(node, ast.Tuple | ast.List) and not all(_is_name(word) for word in node.elts):
            words = node.elts  # more than a list of names: a file or an option is among them
        if any(isinstance(word, ast.Constant) and word.value in COMMANDS for word in words[:1]):
            return True
    return False


def _is_name(word: ast.expr) -> bool:
    return isinstance(word, ast.Constant) and str(word.value).isidentifier()


def judgements(definition: ast.AST) -> Iterator[str]:
    """Comparisons in its assertions that say how good a model is."""
    for node in ast.walk(definition):
        for found in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            if isinstance(found, ast.Compare) and QUALITY.search(text := ast.unparse(found)) and _judges(found):
                yield text


def _judges(comparison: ast.Compare) -> bool:
    """An inequality, a verdict, or an equality with a share that somebody has measured."""
    if any(isinstance(sign, ast.Lt | ast.Gt | ast.LtE | ast.GtE) for sign in comparison.ops):
        return True
    if any(isinstance(node, ast.Constant) and node.value in VERDICTS for node in ast.walk(comparison)):
        return True
    sides = [comparison.left, *comparison.comparators]
    sides = [side.args[0] if isinstance(side, ast.Call) and side.args else side for side in sides]  # approx(0.5)
    return any(
        isinstance(side, ast.Constant) and isinstance(side.value, float) and 0 < side.value < 1 for side in sides
    )


def test_no_test_trains_a_model_and_asserts_how_good_it_became() -> None:
    found = {f"{offence.file}: {offence.text}": offence for offence in Sources(ROOT).offences()}
    assert [str(offence) for key, offence in found.items() if key not in TRUE_OF_EVERY_MODEL] == []
    assert TRUE_OF_EVERY_MODEL.keys() <= found.keys()  # one that is gone is no exception any more


def test_noise_moves_each_weight_a_little_and_by_its_seed() -> None:
    plain, first, again, second = (stored_model("robust", noise).state_dict() for noise in (None, 0, 0, 1))
    for key, weights in plain.items():
        used = weights != 0
        assert torch.equal(first[key], again[key])
        assert ((first[key] != weights) & (first[key] != second[key]))[used].float().mean() > 0.9
        torch.testing.assert_close(first[key], weights, rtol=6 * NOISE, atol=0)
