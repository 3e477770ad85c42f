"""A model file that somebody exported, compared with the run that it is said to be of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.disk import read_json, sha256_of
from calfat_plugin.errors import OptionError, RunError
from calfat_plugin.recipe.plugin_files import PluginFile
from calfat_plugin.runs.loaded_run import LoadedRun, Trust, near
from calfat_plugin.stored_run import Run

if TYPE_CHECKING:
    from torch import nn

    from calfat_plugin.model_files import ModelFile

PROVENANCE = "provenance.json"  #: of an exported folder, with the SHA-256 of its files
CONFIG_FORMAT = 1


def config_of(run: LoadedRun, model: nn.Module) -> dict[str, Any]:
    """What an exported model says about itself, ready for JSON.

    Args:
        run: whose checkpoint the model is of.
        model: its network.
    """
    from calfat_plugin.maths.tied import state_of
    from calfat_plugin.model_files import INPUT, OUTPUT
    from calfat_plugin.options import options_to_plain
    from calfat_plugin.tensor_files import digest_of

    images, pick = run.images, run.experiment.model
    class_names: Sequence[str] = ()
    if run.run is not None:
        class_names = Run(run.run).partition.class_names
    height, width = images.image_size
    return {
        "format": CONFIG_FORMAT,
        "library_name": "pytorch",
        "task": "image-classification",
        "architecture": pick.name,
        "architecture_options": options_to_plain(pick.options),
        "input": {
            "name": INPUT,
            "dtype": "float32",
            "shape": ["batch", images.in_channels, height, width],
            "pixel_range": [0.0, 1.0],
            "normalisation": "inside the model: give it pixels, not normalised values",
        },
        "output": {"name": OUTPUT, "shape": ["batch", images.num_classes], "values": "raw logits, before any softmax"},
        "num_classes": images.num_classes,
        "class_names": [str(name) for name in class_names or run.dataset.class_names],
        "weights_sha256": digest_of(state_of(model)),
    }


def open_exported(path: Path, run: LoadedRun, model: nn.Module, trust: Trust) -> ModelFile:
    """Read a ``.pt2`` or ``.onnx`` file, and refuse one that is not of this run's checkpoint.

    Args:
        path: the file. Where ``provenance.json`` lies beside it, each file that is named there is checked.
        run: the run, with the checkpoint that the file is said to be of.
        model: the run's own network.
        trust: is asked about a ``.pt2`` that this user has not loaded before, since loading one can run code.

    Raises:
        RunError: the file, or one beside it, is another one; the text says which, and what differs.
    """
    from calfat_plugin.model_files import CONFIG, read_onnx, read_pt2

    if not path.is_file():
        raise RunError(f"{path}: no such file.{near(path)}")
    if path.suffix not in (".pt2", ".onnx"):
        raise OptionError(f"--model-file {path}: expected a .pt2 or an .onnx file, as `calfat export` writes them.")
    _check_folder(path.parent)
    if path.suffix == ".onnx":
        exported = read_onnx(path)
    else:
        _refuse_unknown(path, trust)
        exported = read_pt2(path)
    expected = config_of(run, model)
    if exported.config:
        _check_config(path, exported.config, expected)
    beside = path.with_name(CONFIG)
    if beside.is_file():
        _check_config(beside, read_json(beside), expected)
    _check_weights(exported, model)
    return exported


def _check_folder(folder: Path) -> None:
    """Refuse a folder of which a file is not the one that its ``provenance.json`` names."""
    provenance = folder / PROVENANCE
    for subject in read_json(provenance).get("subject") or ():
        try:
            name, expected = subject["name"], subject["digest"]["sha256"]
        except (TypeError, KeyError):
            raise RunError(f"{provenance}: an entry of `subject` has no name or no SHA-256.") from None
        file = folder / Path(str(name)).name
        if not file.is_file():
            continue  # a part of the folder may be passed on alone
        found = sha256_of(file)
        if found != expected:
            raise RunError(
                f"{file}: is not the file that was exported: its SHA-256 is {found}, and {provenance} says {expected}. "
                "It was changed afterwards, or is of another export."
            )


def _refuse_unknown(path: Path, trust: Trust) -> None:
    file = PluginFile(path, sha256_of(path))
    if not file.is_known() and not trust(file):
        raise RunError(
            f"{path}: was not exported by you (SHA-256 {file.sha256}), and loading a .pt2 file can run code that it "
            "holds. If you trust whoever made it, add --trust-plugins (from Python: trust_plugins=True); an .onnx file "
            "can be checked without."
        )


def _check_config(path: Path, config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse what says something else of a model than the run does."""
    if config.get("weights_sha256") != expected["weights_sha256"]:
        raise RunError(
            f"{path}: is about other weights (SHA-256 {config.get('weights_sha256')}) than the run's checkpoint has "
            f"({expected['weights_sha256']}). Name the run, and its --checkpoint, that it was exported from."
        )
    for key in ("class_names", "num_classes", "input", "output"):
        if config.get(key) != expected[key]:
            raise RunError(f"{path}: says {key} {config.get(key)}; of the run it is {expected[key]}.")


def _check_weights(exported: ModelFile, model: nn.Module) -> None:
    """Refuse a file that holds other weights under a name of the network's; one that was folded may lack names."""
    import torch

    from calfat_plugin.maths.tied import state_of

    for name, tensor in state_of(model).items():
        found = exported.tensors.get(name)
        if found is None:
            continue
        if found.shape != tensor.shape or not torch.equal(found.cpu(), tensor.detach().cpu()):
            raise RunError(f"{exported.path}: its weights '{name}' are not those of the run's checkpoint.")


def remember(path: Path) -> None:
    """Note that this user made a file, so that it is loaded without a question."""
    PluginFile(path, sha256_of(path)).remember()
