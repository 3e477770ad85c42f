"""The wheel on the versions of Python where FedML cannot be installed. Downloads gigabytes where no cache has them.

What needs a host is tried in an environment of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import ROOT, Ended
from tests.install.environments import Downloaded, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FACE = """
import calfat_plugin
from calfat_plugin.testing import check_aggregator, check_attacker, check_evaluator, check_partition, check_trainer

run, model = calfat_plugin.load_run("run"), calfat_plugin.load_model("run")
test = calfat_plugin.load_dataset("digits").test
x, y = test.x[:20], test.y[:20]
adversarial = calfat_plugin.attack("pgd20", model, x, y, eps=0.1)
found = calfat_plugin.evaluate(model, x, y, ["natural", "pgd20"], eps=0.1)
assert calfat_plugin.trust("run", examples=20, output="again.json").word
for check, name in ((check_trainer, "calfat"), (check_evaluator, "pgd20"), (check_aggregator, "fedavg")):
    check(name)
check_attacker("sign_flip")
check_partition("dirichlet")
print(len(run.rounds), tuple(model(adversarial).shape), sorted(found))
"""


@pytest.fixture(scope="module", params=["3.12", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter of this version."""
    if (found := interpreter(request.param)) is None:
        pytest.skip(f"no Python {request.param} on this machine")
    return found


def with_our_wheel(folder: Path, python: str, dist: Path, extra: str = "") -> Downloaded:
    """Our wheel and the versions of ``constraints.txt``."""
    environment = Downloaded(folder, python)
    environment.install("-c", str(ROOT / "constraints.txt"), f"{next(dist.glob('*.whl'))}{extra}")
    return environment


@pytest.fixture(scope="module")
def core(python: str, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Downloaded:
    """No extra."""
    return with_our_wheel(tmp_path_factory.mktemp("core"), python, dist)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the FedML that is installed here."""
    path = tmp_path_factory.mktemp("finished") / "run"
    words = ("--set", "train_args.comm_round=1", "--set", "calfat.evaluators=[natural, pgd20]", "--run-dir", str(path))
    command = (sys.executable, "-m", "calfat_plugin.cli.main", "run", "calfat_digits", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


def test_all_that_needs_no_host_works(core: Downloaded, finished: Path) -> None:
    shutil.copytree(finished, core.elsewhere / "run")
    assert core.call("calfat", "check", "calfat_digits").out.count("calfat_digits.yaml: good. calfat with") == 1
    assert core.call("calfat", "suite", str(ROOT / "studies/paper/small_table1.yaml"), "--dry-run").code == 0
    for words in (
        ("attack", "run", "--attacks", "natural,pgd20", "--examples", "20"),
        ("attack", "run", "--attacks", "natural", "--output", "all.json"),
        ("trust", "run", "--examples", "20", "--full"),
        ("report", "run"),
        ("new-plugin", "my-fat", "--kind", "trainer"),
    ):
        done = core.call("calfat", *words)
        assert done.code == 0, (words, done)
    (natural,) = json.loads((core.elsewhere / "all.json").read_text())["evaluations"]
    recorded = json.loads((finished / "results.json").read_text())["evaluations"][0]
    assert (natural["num_examples"], natural["accuracy"]) == (recorded["num_examples"], recorded["accuracy"])
    assert json.loads((core.elsewhere / "run" / "trust.json").read_text())["verdict"]
    done = core.call("python", "-W", "error::DeprecationWarning:calfat_plugin", "-c", FACE)
    assert done == Ended(0, "1 (20, 10) ['natural', 'pgd20']\n", ""), done


def test_a_run_says_which_host_to_install(core: Downloaded) -> None:
    python = core.call("python", "-c", "import platform; print(platform.python_version())").out.strip()
    wanted = (
        "error: FedML is not installed, and a run needs a host that runs its rounds. FedML 0.9.6 installs on Python "
        f"3.10 and 3.11 only, and this is Python {python}. Install Flower (pip install 'calfat-plugin[flower]') and "
        "add --host flower, or common_args.host: flower to the recipe; or make an environment with Python 3.11, where "
        "pip install calfat-plugin brings FedML.\n"
    )
    assert core.call("calfat", "run", "calfat_digits") == Ended(2, "", wanted)
    assert not (core.elsewhere / "runs").exists()


def test_a_run_on_flower(python: str, dist: Path, tmp_path: Path) -> None:
    environment = with_our_wheel(tmp_path, python, dist, "[flower]")
    words = ("--host", "flower", "--set", "train_args.comm_round=1", "--run-dir", "run", "--plain")
    done = environment.call("calfat", "run", "calfat_digits", *words)
    assert (done.code, done.err) == (0, ""), done
    assert json.loads((environment.elsewhere / "run" / "environment.json").read_text())["host"] == "flower"
    assert environment.call("calfat", "trust", "run", "--examples", "20").code == 0
