"""``calfat export`` and ``calfat replay --model-file``: what is written, what loads it, and what is found out."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

import calfat_plugin
from calfat_plugin.disk import sha256_of
from tests.cli.runner import Ended, calfat
from tests.exporting.alone import WITHOUT_ALL_BUT_ONNXRUNTIME, WITHOUT_ALL_BUT_TORCH, alone, programs
from tests.exporting.conftest import NETWORK, RECIPE
from tests.report.made import draw_nothing

FILES = ["README.md", "config.json", "model.onnx", "model.pt2", "model.safetensors", "provenance.json"]

WITH_TORCH = """
import numpy, torch
model = torch.export.load("model.pt2").module()
numpy.save("logits.npy", model(torch.from_numpy(numpy.load("pixels.npy"))).detach().numpy())
"""
WITH_ONNXRUNTIME = """
import numpy, onnxruntime
model = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
numpy.save("logits.npy", model.run(None, {"pixels": numpy.load("pixels.npy")})[0])
"""


def test_the_folder_has_what_it_says_and_every_number_stands(finished: Path, first_export: Ended) -> None:
    assert first_export.code == 0, first_export
    folder = finished / "export"
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == FILES
    for name in ("model.pt2", "model.onnx"):
        assert f"{name}: every number stands" in first_export.out
    config = json.loads((folder / "config.json").read_text())
    assert config["class_names"] == [str(digit) for digit in range(10)]
    assert config["input"]["shape"] == ["batch", 1, 8, 8]
    assert config["input"]["pixel_range"] == [0.0, 1.0]
    assert (config["architecture"], config["architecture_options"]) == ("cnn_small", {"norm": "none"})
    weights = load_file(folder / "model.safetensors")
    own = calfat_plugin.load_model(finished).state_dict()
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], own[name]) for name in own)


@pytest.fixture(scope="module")
def of_ones_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of a network from a user's file, and its export in it."""
    folder = tmp_path_factory.mktemp("sauce")
    (folder / "sauce.py").write_text(NETWORK)
    recipe: dict[str, Any] = {**RECIPE, "model_args": {"model": "sauce:build"}}
    recipe["train_args"] = {**recipe["train_args"], "comm_round": 1}
    recipe["calfat"] = {**recipe["calfat"], "evaluators": ["natural", "fgsm"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")
        draw_nothing(patch)
        calfat_plugin.run(recipe, run_dir=folder / "run", plugins=folder / "sauce.py", progress=False)
        written = calfat_plugin.export(folder / "run")
    assert written.stands
    assert written.replayed.keys() == {"model.pt2", "model.onnx"}
    return folder / "run"


@pytest.mark.parametrize(
    ("place", "program", "refused"),
    [(0, WITH_TORCH, WITHOUT_ALL_BUT_TORCH), (1, WITH_ONNXRUNTIME, WITHOUT_ALL_BUT_ONNXRUNTIME)],
    ids=["torch", "onnxruntime"],
)
def test_it_loads_and_answers_alike_where_this_package_is_not(
    run: Path, of_ones_own: Path, tmp_path: Path, place: int, program: str, refused: list[str]
) -> None:
    """In one process: the program of the card, and the logits of all images, of both networks."""
    shutil.copytree(of_ones_own / "export", tmp_path / "own")
    pixels = calfat_plugin.load_dataset("digits").test.x.float()
    parts = ["import os"]
    for folder in (run / "export", tmp_path / "own"):
        np.save(folder / "pixels.npy", pixels.numpy())
        shown = programs((folder / "README.md").read_text())
        assert len(shown) == 2
        assert len([line for line in shown[place].splitlines() if line.strip()]) <= 5
        parts += [f"os.chdir({str(folder)!r})", shown[place], program]
    done = alone("\n".join(parts), refused, tmp_path)
    assert done.code == 0, done
    assert re.fullmatch(r"((tensor\()?\[\d,? \d\]\)?\n){2}", done.out), "each card's program prints two classes"
    for directory, folder in ((run, run / "export"), (of_ones_own, tmp_path / "own")):
        with torch.no_grad():
            own = calfat_plugin.load_model(directory)(pixels).numpy()
        logits = np.load(folder / "logits.npy")
        assert logits.shape == (len(pixels), 10)
        assert np.abs(logits - own).max() < 1e-4


def test_the_guard_of_these_tests_refuses_this_package(tmp_path: Path) -> None:
    done = alone("import calfat_plugin", WITHOUT_ALL_BUT_TORCH, tmp_path)
    assert "No module named 'calfat_plugin'" in done.err


# --- replay on a file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
@pytest.mark.parametrize("options", [[], ["--eight-bit"]], ids=["as kept", "8 bits"])
def test_the_evidence_is_shown_to_the_file(run: Path, name: str, options: list[str]) -> None:
    done = calfat("replay", run, "--model-file", run / "export" / name, *options, "--json")
    found = json.loads(done.out)
    assert found["model_file"] == str(run / "export" / name)
    assert found["runtime"].split()[0] == {".pt2": "torch", ".onnx": "onnxruntime"}[Path(name).suffix]
    assert 0 <= found["logit_difference"] < 1e-4
    assert found["eight_bit"] is bool(options)
    if options:
        assert 0 < found["fall"] <= found["images"]
        assert (done.code == 0) is found["stands"]
    else:
        assert found["stands"]
        assert found["fall"] == found["images"] > 0
        assert [number["label"] for number in found["numbers"]] == ["natural", "fgsm", "pgd20", "worst-case"]


def test_what_8_bits_change_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two levels a value, hardly an image is what it was."""
    monkeypatch.setattr("calfat_plugin.analyses.replay.rounded_to_8_bits", lambda x: torch.zeros_like(x))
    done = calfat("replay", run, "--model-file", run / "export" / "model.onnx", "--eight-bit", "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert not any(number["stands"] for number in found["numbers"])
    assert calfat("replay", run, "--eight-bit").code == 1, "without a file, too"


def test_python_replays_on_a_file(run: Path) -> None:
    found = calfat_plugin.replay(run, model_file=run / "export" / "model.onnx")
    assert found.stands
    assert found.model_file is not None
    assert found.model_file.path.name == "model.onnx"


def test_an_export_says_which_number_does_not_stand(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    next(found for found in results["evaluations"] if found["label"] == "pgd20")["accuracy"] = 0.999
    (run / "results.json").write_text(json.dumps(results))
    done = calfat("export", run, "--to", run / "false")
    assert done.code == 1
    for name in ("model.pt2", "model.onnx"):
        assert f"{name}: these numbers do not stand: pgd20" in done.out
        (row,) = [line for line in (run / "false" / "README.md").read_text().splitlines() if f"| {name} | " in line][:1]
        assert row.split(" | ")[3] == "pgd20"


# --- files that are not what was measured -----------------------------------------------------------------------------


def forget(run: Path) -> None:
    """Without the file that has the SHA-256 of the others."""
    (run / "export" / "provenance.json").unlink()


def one_weight_of_the_onnx(run: Path) -> str:
    path = run / "export" / "model.onnx"
    model = onnx.load(path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "classifier.weight")
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[0, 0] += 1e-3
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)
    return "its weights 'classifier.weight' are not those"


def one_weight_of_the_pt2(run: Path) -> str:
    path = run / "export" / "model.pt2"
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in contents if name.endswith("weights/weight_0"))
    contents[name] = bytes([contents[name][0] ^ 1, *contents[name][1:]])
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in contents.items():
            archive.writestr(entry, content)
    return "its weights 'body.0.weight' are not those"


def one_class_name_in_the_onnx(run: Path) -> str:
    path = run / "export" / "model.onnx"
    model = onnx.load(path)
    model.metadata_props[0].value = model.metadata_props[0].value.replace('"3", "4"', '"4", "3"')
    onnx.save(model, path)
    return "model.onnx: says class_names"


def one_class_name_in_the_config(run: Path) -> str:
    path = run / "export" / "config.json"
    config = json.loads(path.read_text())
    config["class_names"][3] = "eight"
    path.write_text(json.dumps(config))
    return "config.json: says class_names"


TAMPERED: dict[str, tuple[str, Callable[[Path], str]]] = {
    "a weight of the .onnx": ("model.onnx", one_weight_of_the_onnx),
    "a weight of the .pt2": ("model.pt2", one_weight_of_the_pt2),
    "a class name in the .onnx": ("model.onnx", one_class_name_in_the_onnx),
    "a class name in config.json": ("config.json", one_class_name_in_the_config),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_changed_file_is_refused_by_its_sha_256(run: Path, how: str) -> None:
    name, tamper = TAMPERED[how]
    tamper(run)
    asked = name if name.startswith("model") else "model.onnx"
    done = calfat("replay", run, "--model-file", run / "export" / asked)
    assert done.code == 2
    assert f"{run / 'export' / name}: is not the file that was exported" in done.err


@pytest.mark.parametrize("how", TAMPERED)
def test_it_is_refused_by_what_it_holds_where_nothing_has_its_sha_256(run: Path, how: str) -> None:
    name, tamper = TAMPERED[how]
    text = tamper(run)
    forget(run)
    asked = name if name.startswith("model") else "model.onnx"
    done = calfat("replay", run, "--model-file", run / "export" / asked, "--trust-plugins")
    assert done.code == 2
    assert text in done.err


def test_another_runs_file_is_refused(run: Path, of_ones_own: Path) -> None:
    for name in ("model.pt2", "model.onnx"):
        done = calfat("replay", run, "--model-file", of_ones_own / "export" / name)
        assert done.code == 2
        assert f"{of_ones_own / 'export' / name}: is about other weights" in done.err


def test_a_graph_that_answers_otherwise_falls(run: Path) -> None:
    """The weights and the words are the run's, and an operation was put behind them."""
    path = run / "export" / "model.onnx"
    model = onnx.load(path)
    logits = model.graph.output[0].name
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name == logits:
                node.output[place] = "before"
    model.graph.node.append(onnx.helper.make_node("Neg", ["before"], [logits]))
    onnx.save(model, path)
    forget(run)
    done = calfat("replay", run, "--model-file", path, "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert {"natural", "worst-case"} <= {number["label"] for number in found["numbers"] if not number["stands"]}
    assert found["logit_difference"] > 0.1


def test_a_pt2_that_somebody_else_made_is_not_loaded_unasked(run: Path, tmp_path: Path) -> None:
    path = shutil.copy(run / "export" / "model.pt2", tmp_path / "model.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/extra/note", "")
    done = calfat("replay", run, "--model-file", path)
    assert done.code == 2
    assert "was not exported by you" in done.err
    assert "--trust-plugins" in done.err
    assert calfat("replay", run, "--model-file", path, "--trust-plugins").code == 0


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("model.onnx", b"", "cannot be read as ONNX"),
        ("model.pt2", b"PK", "cannot be read as a .pt2"),
        ("model.h5", b"", "expected a .pt2 or an .onnx file"),
        ("none.onnx", None, "no such file"),
    ],
)
def test_what_is_no_model_file_is_said(run: Path, tmp_path: Path, name: str, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = calfat("replay", run, "--model-file", tmp_path / name, "--trust-plugins")
    assert done.code == 2
    assert text in done.err


# --- what else may be exported ----------------------------------------------------------------------------------------


def test_a_network_of_ones_own_leaves_without_its_code(of_ones_own: Path) -> None:
    for name in ("model.pt2", "model.onnx"):
        content = (of_ones_own / "export" / name).read_bytes()
        for secret in (b"hidden_trick", b"SecretSauce", str(of_ones_own.parent).encode()):
            assert secret not in content, (name, secret)


def test_another_checkpoint_has_its_own_numbers(run: Path) -> None:
    done = calfat("export", run, "--checkpoint", "best-robust", "--json")
    found = json.loads(done.out)
    assert found["folder"] == str(run / "export-best-robust")
    assert found["not_replayed"] == "no adversarial images of this checkpoint are kept"
    card = (run / "export-best-robust" / "README.md").read_text()
    assert "Not measured" in card
    assert "results.json" not in card, "its numbers are those of the last checkpoint"
    shutil.rmtree(run / "export-best-robust")
    attacked = calfat("attack", run, "--checkpoint", "best-robust", "--attacks", "fgsm", "--examples", 50)
    assert attacked.code == 0, attacked
    assert calfat("export", run, "--checkpoint", "best-robust").code == 0
    card = (run / "export-best-robust" / "README.md").read_text()
    assert "From attacks/best-robust.json:" in card
    assert "selected on test split" in card
    weights = load_file(run / "export-best-robust" / "model.safetensors")
    own = calfat_plugin.load_model(run, checkpoint="best-robust").state_dict()
    assert all(torch.equal(weights[name], own[name]) for name in own)
    command = next(line for line in card.splitlines() if line.startswith("calfat replay"))
    words = command.replace("RUN", str(run)).replace("model.onnx", str(run / "export-best-robust" / "model.onnx"))
    assert calfat(*words.split()[1:]).code == 0


def test_a_folder_that_is_there_is_kept(run: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (run / "export").iterdir()}
    done = calfat("export", run)
    assert done.code == 2
    assert f"{run / 'export'}: exists already" in done.err
    assert {path.name: path.stat().st_mtime_ns for path in (run / "export").iterdir()} == before


def test_without_the_extra_the_rest_is_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if "onnx" in name else found(name, *a))
    done = calfat("export", run, "--to", run / "less")
    assert done.code == 0, done
    assert "model.onnx is left out: not installed: onnx, onnxscript, onnxruntime." in done.err
    assert "pip install 'calfat-plugin[onnx]'" in done.err
    assert not (run / "less" / "model.onnx").exists()
    assert "model.pt2: every number stands" in done.out
    asked = calfat("replay", run, "--model-file", run / "export" / "model.onnx")
    assert asked.code == 2
    assert "calfat-plugin[onnx]" in asked.err


def test_what_torch_cannot_trace_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("data-dependent control flow")

    monkeypatch.setattr("torch.export.export", fail)
    done = calfat("export", run, "--to", run / "weights")
    assert done.code == 0, done
    assert "model.pt2 is left out: torch.export cannot trace this network" in done.err
    assert (run / "weights" / "model.safetensors").exists()


def test_without_its_data_a_model_is_exported_and_not_checked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object, **options: object) -> None:
        raise calfat_plugin.DataError("digits: its files are not here.")

    monkeypatch.setattr("calfat_plugin.datasets.published.load_digits", gone)
    done = calfat("export", run, "--to", run / "blind")
    assert done.code == 0, done
    assert "the evidence was not shown to the files: its images are not here" in done.out
    assert "were not shown to these files: its images are not here" in (run / "blind" / "README.md").read_text()


def test_an_export_that_fails_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("calfat_plugin.exporting.folder.write_provenance", fail)
    before = sorted(path.name for path in run.iterdir())
    calfat("export", run, "--to", run / "half")
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_run_without_evidence_is_exported_and_says_so(run: Path) -> None:
    (run / "evidence.safetensors").unlink()
    done = calfat("export", run, "--to", run / "bare")
    assert done.code == 0
    assert "no adversarial images of this checkpoint are kept" in done.out


# --- provenance -------------------------------------------------------------------------------------------------------


def test_provenance_names_every_file_with_its_sha_256(run: Path) -> None:
    folder = run / "export"
    statement = json.loads((folder / "provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert subjects.keys() == there - {"provenance.json"}
    assert all(sha256_of(folder / name) == digest for name, digest in subjects.items())
    build = statement["predicate"]["buildDefinition"]
    inputs = {entry["name"]: entry["digest"] for entry in build["resolvedDependencies"]}
    for name in ("recipe.yaml", "results.json", "evidence.safetensors", "checkpoints/last.safetensors"):
        assert inputs[name] == {"sha256": sha256_of(run / name)}
    partition = json.loads((run / "partition.json").read_text())
    assert inputs["data set digits"] == {"calfat-images-sha256": partition["dataset_sha256"]}
    assert build["externalParameters"]["checkpoint"] == "last"
    assert build["externalParameters"]["commands"]["run"] == "calfat_plugin.run"
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", statement["predicate"]["runDetails"]["metadata"]["startedOn"]
    )
