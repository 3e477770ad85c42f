"""Check that a ``.pt2`` or ``.onnx`` file holds the model of a given run.

``calfat export`` writes such a file, with ``config.json`` and ``provenance.json`` in the same folder. Before
``calfat replay --model-file`` uses such a file, these three are compared with the run's checkpoint.
"""

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

PROVENANCE = "provenance.json"  #: the file in an exported folder with the SHA-256 of all its other files
CONFIG_FORMAT = 1  #: the version of the layout that :func:`config_of` gives


def config_of(loaded_run: LoadedRun, model: nn.Module) -> dict[str, Any]:
    """What ``config.json`` and an exported model file say about the model, ready for JSON.

    Args:
        loaded_run: the run, with the checkpoint that the model was built from.
        model: the network with the weights of this checkpoint.
    """
    from calfat_plugin.maths.tied import state_of
    from calfat_plugin.model_files import INPUT, OUTPUT
    from calfat_plugin.options import options_to_plain
    from calfat_plugin.tensor_files import digest_of

    image_shape = loaded_run.images
    height, width = image_shape.image_size
    architecture = loaded_run.experiment.model
    run_directory = loaded_run.run
    class_names: Sequence[str] = ()
    if run_directory is not None:
        class_names = Run(run_directory).partition.class_names
    if not class_names:  # there is no run directory, or its partition.json has no names
        class_names = loaded_run.dataset.class_names
    return {
        "format": CONFIG_FORMAT,
        "library_name": "pytorch",
        "task": "image-classification",
        "architecture": architecture.name,
        "architecture_options": options_to_plain(architecture.options),
        "input": {
            "name": INPUT,
            "dtype": "float32",
            "shape": ["batch", image_shape.in_channels, height, width],
            "pixel_range": [0.0, 1.0],
            "normalisation": "inside the model: give it pixels, not normalised values",
        },
        "output": {
            "name": OUTPUT,
            "shape": ["batch", image_shape.num_classes],
            "values": "raw logits, before any softmax",
        },
        "num_classes": image_shape.num_classes,
        "class_names": [str(name) for name in class_names],
        "weights_sha256": digest_of(state_of(model)),
    }


def open_exported(path: Path, loaded_run: LoadedRun, model: nn.Module, trust: Trust) -> ModelFile:
    """Read a ``.pt2`` or ``.onnx`` file, and refuse a file that does not hold the model of this run's checkpoint.

    Args:
        path: the exported file. If ``provenance.json`` and ``config.json`` are in the same folder, they are checked,
            too.
        loaded_run: the run, with the checkpoint that the file must have been exported from.
        model: the network with the weights of this checkpoint.
        trust: is asked whether to load a ``.pt2`` file that this user has not loaded before, because loading a ``.pt2``
            can run code.

    Raises:
        RunError: the file or another file of the folder was changed, or belongs to another model; or the file is not
            trusted. The text names the file and the difference.
        OptionError: the name of the file ends neither in ``.pt2`` nor in ``.onnx``.
    """
    from calfat_plugin.model_files import CONFIG, read_onnx, read_pt2

    if not path.is_file():
        hint = near(path)  # "Did you mean ...?", with a file of a similar name
        raise RunError(f"{path}: no such file.{hint}")
    if path.suffix not in (".pt2", ".onnx"):
        raise OptionError(f"--model-file {path}: expected a .pt2 or an .onnx file, as `calfat export` writes them.")
    _check_provenance(path.parent)
    if path.suffix == ".onnx":
        exported = read_onnx(path)
    else:
        _refuse_untrusted(path, is_trusted=trust)
        exported = read_pt2(path)
    expected_config = config_of(loaded_run, model)
    if exported.config:
        _check_config(path, exported.config, expected_config)
    config_file = path.with_name(CONFIG)
    if config_file.is_file():
        _check_config(config_file, read_json(config_file), expected_config)
    _check_weights(exported, model)
    return exported


def _check_provenance(folder: Path) -> None:
    """Refuse an exported folder with a file whose SHA-256 is not the one in the folder's ``provenance.json``."""
    provenance = folder / PROVENANCE
    statement = read_json(provenance)  # empty if there is no such file
    entries = statement.get("subject")  # one entry for each file of the folder, in the format of in-toto
    if not entries:
        return
    for entry in entries:
        try:
            name = entry["name"]
            expected_sha256 = entry["digest"]["sha256"]
        except (TypeError, KeyError):
            raise RunError(f"{provenance}: an entry of `subject` has no name or no SHA-256.") from None
        file = folder / Path(str(name)).name  # without folders in the name, which could lead out of this folder
        if not file.is_file():
            continue  # somebody may pass on a part of the folder alone
        sha256 = sha256_of(file)
        if sha256 != expected_sha256:
            raise RunError(
                f"{file}: is not the file that was exported: its SHA-256 is {sha256}, and {provenance} says "
                f"{expected_sha256}. It was changed afterwards, or is of another export."
            )


def _refuse_untrusted(path: Path, is_trusted: Trust) -> None:
    """Refuse a ``.pt2`` file that this user has not loaded before, unless ``is_trusted`` allows to load it."""
    file = PluginFile(path, sha256_of(path))  # the user's list of known code has plugin files and .pt2 files
    if file.is_known() or is_trusted(file):
        return
    raise RunError(
        f"{path}: was not exported by you (SHA-256 {file.sha256}), and loading a .pt2 file can run code that it "
        "holds. If you trust whoever made it, add --trust-plugins (from Python: trust_plugins=True); an .onnx file "
        "can be checked without."
    )


def _check_config(path: Path, config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a file that describes another model than the run's.

    Args:
        path: the file, for the error.
        config: what the file says about the model.
        expected: what :func:`config_of` says about the run's model.
    """
    # The weights come first, because their error names the likely mistake: the wrong run or the wrong checkpoint.
    if config.get("weights_sha256") != expected["weights_sha256"]:
        raise RunError(
            f"{path}: is about other weights (SHA-256 {config.get('weights_sha256')}) than the run's checkpoint has "
            f"({expected['weights_sha256']}). Name the run, and its --checkpoint, that it was exported from."
        )
    for key in ("class_names", "num_classes", "input", "output"):
        if config.get(key) != expected[key]:
            raise RunError(f"{path}: says {key} {config.get(key)}; of the run it is {expected[key]}.")


def _check_weights(exported: ModelFile, model: nn.Module) -> None:
    """Refuse an exported file in which a weight differs from the weight of the same name in the run's model.

    A name that the file lacks is skipped. Tools that prepare a model for another runtime may fold a weight into others,
    or leave out one that no operation reads, so a file without some names can still hold the same model.
    """
    import torch

    from calfat_plugin.maths.tied import state_of

    for name, weight in state_of(model).items():
        exported_weight = exported.tensors.get(name)
        if exported_weight is None:
            continue
        is_same = exported_weight.shape == weight.shape and torch.equal(exported_weight.cpu(), weight.detach().cpu())
        if not is_same:
            raise RunError(f"{exported.path}: its weights '{name}' are not those of the run's checkpoint.")


def remember(path: Path) -> None:
    """Note that this user has written the file ``path``, so that :func:`open_exported` loads it without asking."""
    PluginFile(path, sha256_of(path)).remember()
