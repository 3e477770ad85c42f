"""The set-up keeps its word: bounds, pins, commands, what is shipped, and what README says to type."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from calfat_plugin.host.installed import FEDML_INSTALLS
from tests.docs.pages import blocks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "calfat_plugin"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
WITH_FEDML = PYTHONS[:2]

# Module -> distribution, where the two names differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "botocore": "boto3",  # which is made of it, and pins it
    "grpc": "grpcio",
    "mlflow": "mlflow-skinny",
    "paho": "paho-mqtt",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def read_setup_cfg() -> configparser.ConfigParser:
    setup = configparser.ConfigParser(comment_prefixes=("#",), interpolation=None, delimiters=("=",))
    setup.optionxform = str  # type: ignore[method-assign, assignment]
    setup.read_string((ROOT / "setup.cfg").read_text())
    return setup


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


SETUP = read_setup_cfg()
REQUIRED = [Requirement(line) for line in lines(SETUP["options"]["install_requires"])]
EXTRAS = {extra: [Requirement(line) for line in lines(text)] for extra, text in SETUP["options.extras_require"].items()}
DECLARED = REQUIRED + [requirement for extra in EXTRAS.values() for requirement in extra]


def is_for(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def pins(python: str) -> dict[str, str]:
    """The version constraints.txt gives each distribution on one version of Python."""
    found: dict[str, str] = {}
    for line in lines((ROOT / "constraints.txt").read_text()):
        pin = Requirement(line)
        if is_for(pin, python):
            (specifier,) = pin.specifier
            name = canonicalize_name(pin.name)
            assert specifier.operator == "==", f"{line}: not an exact version"
            assert name not in found, f"{line}: a second version for Python {python}"
            found[name] = specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_constraints_meet_every_bound_of_setup_cfg(requirement: Requirement, python: str) -> None:
    if is_for(requirement, python):
        assert requirement.specifier.contains(pins(python)[canonicalize_name(requirement.name)])


def test_the_same_torch_everywhere_and_fedml_where_it_can_be_installed() -> None:
    arithmetic = {(pins(python)["torch"], pins(python)["torchvision"]) for python in PYTHONS}
    assert len(arithmetic) == 1
    fedml = [python for python in PYTHONS for needed in REQUIRED if needed.name == "fedml" and is_for(needed, python)]
    assert fedml == list(WITH_FEDML)
    assert (f"{sys.version_info.major}.{sys.version_info.minor}" in fedml) == FEDML_INSTALLS


def closure(pinned: dict[str, str]) -> Iterator[str]:
    """Every distribution that the declared ones bring in, read from what is installed here at its pinned version."""
    waiting = [(needed.name, needed.extras) for needed in DECLARED if needed.marker is None or needed.marker.evaluate()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # an extra, or a marker's other branch, that this environment goes without
        name = canonicalize_name(name)
        yield name
        if name == "torch" or pinned.get(name) != Version(metadata.version(name)).public:
            continue  # torch names its CUDA libraries exactly itself; other versions may need others
        for needed in map(Requirement, requires):
            key = (canonicalize_name(needed.name), frozenset(needed.extras))
            environments = [{"extra": extra} for extra in extras or {""}]
            if key not in seen and (needed.marker is None or any(needed.marker.evaluate(e) for e in environments)):
                seen.add(key)
                waiting.append((needed.name, needed.extras))


def test_constraints_pin_everything_that_gets_installed() -> None:
    pinned = pins(f"{sys.version_info.major}.{sys.version_info.minor}")
    needed = set(closure(pinned))
    assert {"fedml", "wandb", "requests"} <= needed or sys.version_info >= (3, 12)
    assert sorted(needed - set(pinned)) == []


def test_pip_accepts_what_is_declared_and_make_takes_a_python_with_fedml() -> None:
    accepted = SpecifierSet(SETUP["options"]["python_requires"])
    minors = [f"3.{minor}" for minor in range(30) if accepted.contains(f"3.{minor}.1")]
    tried = (ROOT / "Makefile").read_text().partition("VENV ?=")[0]
    assert minors == list(PYTHONS) == re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert tuple(f"{a}.{b}" for a, b in re.findall(r"\((\d+), (\d+)\)", tried)) == WITH_FEDML


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module


def test_every_third_party_import_is_declared() -> None:
    shipped = [r for extra, rs in EXTRAS.items() if extra != "dev" for r in rs] + REQUIRED
    declared = {canonicalize_name(requirement.name) for requirement in shipped}
    own = {*sys.stdlib_module_names, PACKAGE.name}
    undeclared = [
        f"{file.relative_to(ROOT)}:{line}: {module}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, module in imported_modules(file)
        if (top := module.partition(".")[0]) not in own
        and canonicalize_name(DISTRIBUTIONS.get(top, top)) not in declared
    ]
    assert undeclared == []


def test_every_file_of_the_package_is_shipped() -> None:
    """Packages are found by their __init__.py, and other files only by a pattern of package_data."""
    patterns = SETUP["options.package_data"]["*"].replace(" ", "").split(",")
    files = [f for f in PACKAGE.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    left_behind = [
        str(file.relative_to(ROOT))
        for file in files
        if not (file.parent / "__init__.py").exists()
        or not (file.suffix == ".py" or any(fnmatch(file.name, pattern) for pattern in patterns))
    ]
    assert PACKAGE / "py.typed" in files
    assert left_behind == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("README.md", {"run", "test", "test-repository", "docs"}),
        ("CONTRIBUTING.md", {"run", "quick", "noise", "test", "test-repository", "slow", "lint", "docs", "clean"}),
        ("docs/install.md", {"run"}),
    ],
)
def test_make_commands_of_a_page_exist(page: str, least: set[str]) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", (ROOT / page).read_text(), flags=re.MULTILINE))
    assert least <= named <= make_targets()


SET_UPS = (".venv/.installed-dev", ".venv-flower/.installed")
STEPS = (*SET_UPS, "lint", "run-flower", "test-flower", "test-repository", "test")


@pytest.mark.parametrize("broken", [None, *STEPS])
def test_ci_fails_with_each_of_its_steps(broken: str | None, tmp_path: Path) -> None:
    """Also with those in the background, whose output it shows then; pytest's closing line ends that of a good one."""
    for name in (".ci", "programs"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name in ("make", "mosquitto", "chromium", "g++"):
        (tmp_path / "programs" / name).write_text(f'#!/bin/sh\necho "made $1"; test "$1" != {broken or "-"}\n')
        (tmp_path / "programs" / name).chmod(0o755)
    path = f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", tmp_path / ".ci" / "run"], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == int(broken is not None)
    assert f"made {broken}" in done.stdout + done.stderr if broken else done.stdout.endswith("made test\n")


def test_the_image_is_made_by_what_make_has_and_docker_is_given() -> None:
    """Nothing here can build images; what the Dockerfile names must exist."""
    (target,) = re.findall(r"^RUN .*make (\S+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert f"$(VENV){target.removeprefix('.venv')}:" in (ROOT / "Makefile").read_text()
    ignored = lines((ROOT / ".dockerignore").read_text())
    needed = ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt", "build_backend", PACKAGE.name, "recipes")
    assert [name for name in needed if any(fnmatch(name, pattern) for pattern in ignored)] == []


def test_make_test_leaves_out_what_holds_the_repository() -> None:
    """Exit code 5 of pytest: no test was collected."""
    pytest_of = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m"]
    of_the_repository = ["tests/studies", "tests/docs", "tests/install", "tests/test_setup.py"]
    for expression, paths in (("not repository", of_the_repository), ("repository", ["tests/maths", "tests/recipe"])):
        collected = subprocess.run([*pytest_of, expression, *paths], cwd=ROOT, capture_output=True, text=True)
        assert collected.returncode == 5, collected.stdout


FAKE_PYTHON = """\
#!/bin/sh
echo "$@" >> calls.txt
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/calfat"
fi
"""


class Checkout:
    """The set-up files alone, and a stand-in for Python that writes down how it is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
            (folder / name).write_text((ROOT / name).read_text())
        (folder / "python").write_text(FAKE_PYTHON)
        (folder / "python").chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "PYTHON=./python", *arguments]
        # Without the MAKEFLAGS, and the WORKERS, of the `make test` that may be running this.
        environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "WORKERS"}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """What the stand-in was asked since the last question, pip's own switches aside."""
        record = self.folder / "calls.txt"
        asked = [call.replace("--disable-pip-version-check ", "") for call in lines(record.read_text())]
        record.write_text("")
        return asked


RUN = "run recipes/calfat_digits.yaml"
PYTEST = "-m pytest -n 3 --dist loadfile --no-loadscope-reorder"
TEST = f"{PYTEST} -m not slow and not repository --weight-noise 0"
TEST_REPOSITORY = f"{PYTEST} -m repository and not slow"
UPGRADE = "-m pip install -c constraints.txt --upgrade pip"
INSTALL = "-m pip install -c constraints.txt -e ."


def test_make_installs_once_and_again_after_a_changed_pin(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.make("run").returncode == 0
    assert checkout.calls() == ["-m venv .venv", UPGRADE, INSTALL, RUN]
    checkout.make("run", "ARGS=--seed 1")
    assert checkout.calls() == [f"{RUN} --seed 1"]
    checkout.make("test")
    assert checkout.calls() == [f"{INSTALL}[dev]", TEST]
    checkout.make("test")
    checkout.make("test-repository")
    checkout.make("docs")
    checkout.make("run")
    assert checkout.calls() == [TEST, TEST_REPOSITORY, "-m mkdocs build", RUN]
    (tmp_path / "constraints.txt").write_text("rich==15.0.0\n")
    checkout.make("run")
    assert checkout.calls() == [INSTALL, RUN]


@pytest.mark.parametrize("page", ["../README.md", "install.md"])
def test_the_commands_of_a_page_work(page: str, tmp_path: Path) -> None:
    """Those that are not said to be left out."""
    checkout = Checkout(tmp_path)
    typed = [line for block in blocks(page) if block.is_run for line in block.text.splitlines()]
    for line in typed:
        make, *words = shlex.split(line.replace("/path/to/python3.11", "./python"), comments=True)
        assert make == "make"
        ended = checkout.make(*words)
        assert ended.returncode == 0, ended.stderr
    ran = [call for call in checkout.calls() if call.startswith(("run ", "download ", "-m pytest"))]
    assert len(ran) == len(typed)


# Python 3.12, whose version is none of ours; `-m venv` and `-m pip install uv` leave a uv behind, which brings 3.11.
NEWER_PYTHON = """\
#!/bin/sh
case "$*" in
    -c*) exit 1 ;;
    "-m venv"*) test -e no-venv && exit 1; mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *uv) test -e no-uv && { echo "no index" >&2; exit 1; }; mkdir -p .venv-uv/bin && cp uv-stand-in .venv-uv/bin/uv ;;
esac
"""
UV = """\
#!/bin/sh
echo "uv $@" >> calls.txt
test -e no-python && { echo "error: cannot download" >&2; exit 1; }
for folder; do :; done
sh ./python -m venv "$folder"
"""


class NewMachine(Checkout):
    """A machine whose only Python is a stand-in of 3.12."""

    def __init__(self, folder: Path, *missing: str) -> None:
        super().__init__(folder)
        (folder / "programs").mkdir()
        for tool in ("sh", "mkdir", "cp", "touch", "make"):
            (folder / "programs" / tool).symlink_to(shutil.which(tool) or tool)
        for path, text in (("programs/python3", NEWER_PYTHON), ("uv-stand-in", UV)):
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)
        for what in missing:
            (folder / f"no-{what}").touch()

    def run(self) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder / "programs")}
        command = ["make", "--no-print-directory", "run"]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)


BRINGS = "No Python 3.10 or 3.11 found (fedml 0.9.6 installs on no other): uv brings 3.11 into .venv"
BRING = "uv venv --allow-existing --seed --python 3.11 .venv"


@pytest.mark.parametrize("missing", [(), ("venv",)])
def test_make_brings_a_fitting_python_where_there_is_none(missing: tuple[str, ...], tmp_path: Path) -> None:
    machine = NewMachine(tmp_path, *missing)
    ended = machine.run()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[0] == BRINGS
    if not missing:  # the stand-in of 3.11 is made by `-m venv`, too
        assert machine.calls() == [BRING, "-m venv .venv", UPGRADE, INSTALL, RUN]
        assert machine.run().stdout.splitlines() == [f".venv/bin/calfat {RUN} "]


@pytest.mark.parametrize(("missing", "why"), [("uv", "uv could not be installed"), ("python", "uv could not fetch it")])
def test_make_says_what_could_not_be_fetched(missing: str, why: str, tmp_path: Path) -> None:
    ended = NewMachine(tmp_path, missing).run()
    assert (ended.returncode, ended.stdout.splitlines()) == (2, [BRINGS])
    assert ended.stderr.startswith(
        f"There is no Python 3.11: {why} (.venv-uv/log.txt says why). Install Python 3.10 or "
    )
    assert (tmp_path / ".venv-uv" / "log.txt").read_text() in ("no index\n" * 2, "error: cannot download\n")
    assert not (tmp_path / ".venv").exists()
