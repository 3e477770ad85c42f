"""A network as a file that other programs load without this package: torch.export's ``.pt2``, or ONNX.

Both hold the weights under their own names and, as a text, what ``config.json`` beside them says. Neither holds source
code: what torch notes of the lines that it traced is removed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from calfat_plugin.disk import read_whole
from calfat_plugin.errors import ModelError, RunError
from calfat_plugin.models.building import ImageShape
from calfat_plugin.peer_text import error_text

if TYPE_CHECKING:
    from torch.export import ExportedProgram

CONFIG = "config.json"  #: beside the model files, and the name of an extra file in a ``.pt2``
WEIGHTS, PT2, ONNX = "model.safetensors", "model.pt2", "model.onnx"
INPUT, OUTPUT = "pixels", "logits"  #: what an ONNX file calls them
_KEY = "calfat"  # of an ONNX file's metadata, for what config.json says
_LARGEST = 2**31  # bytes of an ONNX file: protobuf cannot hold more
# Notes of torch about the traced source. Programs run without them, and they would publish a user's code and folders.
_NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A network as a file holds it.

    Attributes:
        path: the file.
        runtime: what computes it, with its version.
        ask: takes (N, C, H, W) float32 pixels on any device, returns (N, classes) float32 logits on the CPU.
        tensors: the weights in the file, by name.
        config: what the file says about itself; empty where it says nothing.
    """

    path: Path
    runtime: str
    ask: Callable[[Tensor], Tensor]
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


# --- writing ----------------------------------------------------------------------------------------------------------


def traced(model: nn.Module, images: ImageShape) -> ExportedProgram:
    """The operations of a network in evaluation mode, for any number of images.

    Raises:
        ModelError: torch cannot trace the network.
    """
    example = torch.zeros(2, images.in_channels, *images.image_size)
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # somebody else's network may fail to be traced in any way
        raise ModelError(f"torch.export cannot trace this network ({error_text(error)}).") from error
    for node in program.graph.nodes:
        for note in _NOTES:
            node.meta.pop(note, None)
    return program


def write_pt2(path: Path, program: ExportedProgram, config: Mapping[str, Any]) -> None:
    with _quiet():
        torch.export.save(program, path, extra_files={CONFIG: json.dumps(config)})


def missing_for_onnx() -> str:
    """Which packages are missing to write and to check an ONNX file, and how to get them; empty: none is."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"not installed: {', '.join(missing)}. Get it with: pip install 'calfat-plugin[onnx]'"


def write_onnx(path: Path, program: ExportedProgram, config: Mapping[str, Any]) -> None:
    """Write with torch's own exporter.

    Raises:
        ModelError: ONNX has no operation for something that the network does.
    """
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                optimize=False,  # folding would change the weights, which then could not be compared by name
                verbose=False,
            )
            assert exported is not None  # with dynamo=True
            exported.model.metadata_props[_KEY] = json.dumps(config)
            exported.save(path)
    except Exception as error:  # the exporter wraps whatever it meets
        raise ModelError(f"torch.onnx.export cannot write this network ({error_text(error)}).") from error


# --- reading ----------------------------------------------------------------------------------------------------------


def read_pt2(path: Path) -> ModelFile:
    """Load a ``.pt2``. Loading one can run code that its author put into it."""
    texts = {CONFIG: ""}
    try:
        with _quiet():
            program = torch.export.load(path, extra_files=texts)
            module = program.module()
    except Exception as error:  # a damaged file may fail in any way
        raise RunError(f"{path}: cannot be read as a .pt2 ({error_text(error)}).") from None

    def ask(x: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                logits: Tensor = module(x.cpu())
            return logits.float()
        except Exception as error:
            raise RunError(f"{path}: a forward pass on images {tuple(x.shape)} failed ({error_text(error)}).") from None

    return ModelFile(path, f"torch {torch.__version__}", ask, program.state_dict, _config(path, texts[CONFIG]))


def read_onnx(path: Path) -> ModelFile:
    """Load an ONNX file for onnxruntime, on the CPU."""
    missing = missing_for_onnx()
    if missing:
        raise RunError(f"{path}: an ONNX file needs packages that are {missing}.")
    import numpy as np
    import onnx
    import onnxruntime

    content = read_whole(path, _LARGEST)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        proto = onnx.load_from_string(content)
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    except Exception as error:  # a damaged file may fail in any way
        raise RunError(f"{path}: cannot be read as ONNX ({error_text(error)}).") from None
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    texts = {entry.key: entry.value for entry in proto.metadata_props}

    def ask(x: Tensor) -> Tensor:
        try:
            (logits,) = session.run(None, {session.get_inputs()[0].name: x.cpu().numpy()})
        except Exception as error:
            raise RunError(f"{path}: a forward pass on images {tuple(x.shape)} failed ({error_text(error)}).") from None
        return torch.from_numpy(logits).float()

    return ModelFile(path, f"onnxruntime {onnxruntime.__version__}", ask, tensors, _config(path, texts.get(_KEY, "")))


def _config(path: Path, text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: what it says about itself is no JSON ({error}).") from None
    if not isinstance(config, dict):
        raise RunError(f"{path}: what it says about itself is no JSON mapping.")
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and log lines of torch's exporters, which are about torch's own insides."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
