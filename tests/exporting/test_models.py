"""Every built-in network becomes a .pt2 and an ONNX file, which answer as it does for any number of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from calfat_plugin.interfaces import SetUpTask
from calfat_plugin.model_files import read_onnx, read_pt2, traced, write_onnx, write_pt2
from calfat_plugin.models.building import seeded
from calfat_plugin.models.networks import CNN, VGG8, AlexNet64, CNNMcMahan, CNNSmall, CNNStrided, PreActResNet, ResNet18
from calfat_plugin.models.norms import with_dual_norms

slow = pytest.mark.slow
MODELS = [
    pytest.param(partial(CNNSmall, norm="fixbn"), 8, id="cnn_small-fixbn"),
    pytest.param(partial(CNNStrided, norm="group"), 28, id="cnn_strided-group"),
    pytest.param(lambda **shape: with_dual_norms(CNNSmall(norm="batch", **shape)), 8, id="dual norms"),
    pytest.param(partial(CNN, norm="batch"), 32, id="cnn-batch", marks=slow),
    pytest.param(CNNMcMahan, 28, id="cnn_mcmahan", marks=slow),
    pytest.param(VGG8, 32, id="vgg8", marks=slow),
    pytest.param(ResNet18, 32, id="resnet18", marks=slow),
    pytest.param(PreActResNet, 32, id="preact_resnet", marks=slow),
    pytest.param(AlexNet64, 64, id="alexnet64", marks=slow),
]


@pytest.mark.parametrize(("build", "side"), MODELS)
def test_a_built_in_network_answers_as_it_did(build: type[nn.Module], side: int, tmp_path: Path) -> None:
    task = SetUpTask(10, 1, (side, side), torch.device("cpu"))
    model = seeded(lambda: build(in_channels=1, image_size=(side, side), num_classes=10), 3).train()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(torch.rand(16, 1, side, side, generator=noise))  # statistics that are not those of a new network
    model.eval()
    program = traced(model, task)
    write_pt2(tmp_path / "model.pt2", program, {"one": 1})
    write_onnx(tmp_path / "model.onnx", program, {"one": 1})
    for exported in (read_pt2(tmp_path / "model.pt2"), read_onnx(tmp_path / "model.onnx")):
        assert exported.config == {"one": 1}
        unused = model.state_dict().keys() - exported.tensors.keys()
        assert unused <= {name for name in model.state_dict() if "num_batches" in name or ".clean." in name}
        for number in (1, 2, 5):
            x = torch.rand(number, 1, side, side, generator=noise)
            with torch.no_grad():
                logits = model(x)
            assert (exported.ask(x) - logits).abs().max() < 1e-4 * max(1.0, float(logits.abs().max()))
