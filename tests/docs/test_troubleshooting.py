"""docs/troubleshooting.md: every message that it quotes is one of the package's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.runner import RECIPES, calfat
from tests.docs.pages import text_of
from tests.docs.sources import HOLE, texts
from tests.inputs.on_disk import write_class_folders

QUOTED = re.findall(r"^### `(.+)`$", text_of("troubleshooting.md"), re.MULTILINE)


def test_there_is_something_to_check() -> None:
    assert len(QUOTED) >= 60
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_the_source_has_it(message: str) -> None:
    """With an ellipsis where the source fills in a value, or at the end for what follows."""
    words = message.removesuffix(HOLE).rstrip()
    assert len(words) > 12
    assert any(words in text for text in texts()), message


@pytest.mark.parametrize(
    "text",
    [
        "there is no section 'calfatt'.",
        "Pick the recipe apart",  # nowhere
        "Every error a user can meet",  # in a docstring
        "… is installed; calfat_plugin is tested with fedml",  # other words where a value is
    ],
)
def test_other_texts_are_not_its_messages(text: str) -> None:
    assert not any(text in known for known in texts())


DIGITS = str(RECIPES / "calfat_digits.yaml")
PRODUCED = {
    "no such file.": ["check", "nowhere/recipe.yaml"],
    "there is no section 'calfat'.": ["check", "plain.yaml"],
    "not valid YAML: …": ["check", "broken.yaml"],
    "there is no such key. Did you mean '…'?": ["check", DIGITS, "--set", "train_args.comm_rounde=3"],
    "this key belongs in the section …; move it there.": ["check", DIGITS, "--set", "data_args.comm_round=3"],
    "this key has no effect here: …": ["check", DIGITS, "--set", "train_args.nesterov=true"],
    "this key is unknown to FedML and calfat_plugin and has no effect.": ["check", DIGITS, "--set", "train_args.zz=1"],
    "Remove the key…": ["check", DIGITS, "--set", "common_args.enable_dp=true"],
    "no … called '…'.": ["check", DIGITS, "--set", "calfat.trainer=calfatt"],
    "expected a fraction of the pixel range such as …": ["check", DIGITS, "--set", "calfat.threat.eps=8"],
    "has no option '…'.": ["check", DIGITS, "--set", "calfat.trainer={name: fedpgd, beta: 6}"],
    "does not support the loss modifier '…'.": ["check", DIGITS, "--set", "calfat.trainer={name: fedrbn, loss: robal}"],
    "cannot work together: …": ["check", DIGITS, "--set", "calfat.trainer=standard", "--set", "calfat.aggregator=sfat"],
    "this is a suite. Run it with: …": ["run", "digits_table1"],
    "it implements no hook; is @hookimpl missing…": ["check", DIGITS, "--plugin", "bare.py"],
    "there is no hook '…'.": ["check", DIGITS, "--plugin", "misspelt.py"],
    "there is a module '…' already …": ["check", DIGITS, "--plugin", "json.py"],
    "there is a run in this directory already. Add --resume to continue it, or choose another --run-dir.": [
        *("run", DIGITS, "--run-dir", "run")
    ],
    "there is no run here to resume (no recipe.yaml).": ["run", DIGITS, "--resume", "--run-dir", "empty"],
    "no unfinished run with seed … to resume …": ["run", DIGITS, "--resume"],
    "is for simulations: in a cross-silo run each client has a process of its own.": [
        *("run", DIGITS, "--workers", "2", "--set", "common_args.training_type=cross_silo"),
        *("--set", "comm_args.backend=GRPC"),
    ],
    "there are no addresses. …": [
        *("run", DIGITS, "--role", "server", "--set", "common_args.training_type=cross_silo"),
        *("--set", "comm_args.backend=GRPC"),
    ],
    "a cross-silo run has a process for each party.": [
        *("run", DIGITS, "--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC")
    ],
    "can be reached from other machines, and there are no certificates.": [
        *("check", DIGITS, "--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC"),
        *("--set", "calfat.silo.parties=[a:1, b:1, c:1, d:1, e:1, f:1]"),
    ],
    "data set …: … is missing (looked in …).": [
        *("run", DIGITS, "--set", "data_args.dataset=cifar10", "--set", "data_args.data_cache_dir=empty")
    ],
    "Expected one folder of images for each class, …/<class>.": [
        *("run", DIGITS, "--set", "data_args.dataset=image_folder", "--set", "data_args.data_cache_dir=empty")
    ],
    "images of …x… are too small; the smallest that it can take is …x….": [
        *("run", DIGITS, "--set", "model_args.model=cnn", "--set", "data_args.dataset=image_folder"),
        *("--set", "data_args.data_cache_dir=images", "--set", "calfat.dataset={size: 8}"),
    ],
    "module … cannot be imported (…: …). Is it installed, or on PYTHONPATH?": [
        *("run", DIGITS, "--set", "model_args.model=nowhere.nets:make", "--set", "data_args.max_train_examples=200")
    ],
    "training examples. Lower the number of clients or take a larger data set.": [
        *("run", DIGITS, "--set", "data_args.max_train_examples=20")
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the commands find there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path))
    for name in ("empty", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("calfat: {}\n")
    (tmp_path / "plain.yaml").write_text("train_args: {comm_round: 3}\n")
    (tmp_path / "broken.yaml").write_text("calfat: {trainer: calfat\n")
    (tmp_path / "bare.py").write_text("def calfat_models():\n    return []\n")
    (tmp_path / "json.py").write_text("")
    (tmp_path / "misspelt.py").write_text(
        "from calfat_plugin import hookimpl\n\n\n@hookimpl\ndef calfat_modles():\n    return []\n"
    )
    write_class_folders(tmp_path / "images", ["a", "b"], 120, 4, size=8)
    return tmp_path


@pytest.mark.parametrize("message", PRODUCED)
def test_a_command_prints_it(message: str, folder: Path) -> None:
    assert message in QUOTED
    ended = calfat(*PRODUCED[message])
    words = [re.escape(part) for part in message.removesuffix(HOLE).rstrip().split(HOLE)]
    assert re.search(".*?".join(words), ended.err, re.DOTALL), ended.err
    assert ended.code == 2 or ended.err.startswith("warning: ")
