from __future__ import annotations

import sys
import threading
import types
from functools import partial

import pytest
import torch
from torch import nn

from calfat_plugin.entries import ModelEntry
from calfat_plugin.errors import ModelError
from calfat_plugin.interfaces import SetUpTask
from calfat_plugin.models import base
from calfat_plugin.models.base import PixelConv2d, UnpaddedConv2d, conv_block, effective_input
from calfat_plugin.models.building import built_model, factory_at, refuse_other_training_mode, seeded
from calfat_plugin.models.networks import CNN, VGG8, AlexNet64, CNNMcMahan, CNNSmall, CNNStrided, ResNet18
from calfat_plugin.models.norms import with_dual_norms
from calfat_plugin.registry import Registry
from calfat_plugin.testing.tiny import tiny_experiment


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        pytest.param(CNN, 319_242, id="cnn"),
        pytest.param(lambda: CNN(num_classes=100), 503_652, id="cnn-100"),
        pytest.param(CNNMcMahan, 878_538, id="cnn_mcmahan"),
        pytest.param(lambda: CNNMcMahan(1, (28, 28), padding=2), 1_663_370, id="cnn_mcmahan-mnist"),
        pytest.param(VGG8, 3_918_858, id="vgg8"),
        pytest.param(lambda: VGG8(batch_norm=False), 3_915_914, id="vgg8-plain"),
        pytest.param(ResNet18, 11_173_962, id="resnet18"),
        pytest.param(lambda: AlexNet64(num_classes=12), 57_053_004, id="alexnet64"),
        pytest.param(CNNSmall, 30_634, id="cnn_small"),
        pytest.param(CNNStrided, 33_546, id="cnn_strided"),
        *(pytest.param(partial(CNN, norm=norm), 320_010, id=f"cnn-{norm}") for norm in ("batch", "group")),
        *(pytest.param(partial(CNNSmall, norm=norm), 30_890, id=f"cnn_small-{norm}") for norm in ("batch", "group")),
        *(
            pytest.param(partial(CNNStrided, norm=norm), 33_770, id=f"cnn_strided-{norm}")
            for norm in ("batch", "group")
        ),
    ],
)
def test_parameter_counts(build, expected):
    with torch.device("meta"):  # shapes only: nothing is drawn or stored
        assert parameter_count(build()) == expected


MODELS = [
    pytest.param(CNN, (3, (32, 32)), 2048, id="cnn"),
    pytest.param(CNN, (1, (28, 28)), 128 * 3 * 3, id="cnn-28"),
    pytest.param(CNN, (3, (20, 33)), 128 * 1 * 4, id="cnn-oblong"),
    pytest.param(CNNMcMahan, (3, (32, 32)), 512, id="cnn_mcmahan"),
    pytest.param(VGG8, (3, (16, 20)), 512, id="vgg8"),
    pytest.param(ResNet18, (3, (8, 12)), 512, id="resnet18"),
    pytest.param(CNNSmall, (1, (8, 8)), 256, id="cnn_small"),
    pytest.param(CNNSmall, (3, (13, 9)), 64 * 3 * 2, id="cnn_small-oblong"),
    pytest.param(CNNStrided, (1, (28, 28)), 64 * 4 * 4, id="cnn_strided"),
    pytest.param(partial(CNNStrided, norm="group"), (3, (9, 1)), 64 * 2, id="cnn_strided-oblong"),
    pytest.param(partial(CNNSmall, norm="batch"), (1, (8, 8)), 256, id="cnn_small-batch"),
]
every_model = pytest.mark.parametrize(("model_class", "shape", "width"), MODELS)


def images(channels: int, size: tuple[int, int], n: int = 3) -> torch.Tensor:
    return torch.rand((n, channels, *size), generator=torch.Generator().manual_seed(0))


@every_model
def test_shapes_forward_and_backward(model_class, shape, width):
    model = seeded(lambda: model_class(*shape, 7), 0)
    x = images(*shape).requires_grad_()
    features = model.features(x)
    assert features.shape == (3, width)
    logits = model(x)
    assert logits.shape == (3, 7)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert x.grad.abs().sum() > 0


@every_model
def test_forward_is_the_classifier_on_the_features_and_layout_does_not_matter(model_class, shape, width):
    model = seeded(lambda: model_class(*shape, 7), 0).eval()
    x = images(*shape)
    logits = model(x)
    assert torch.equal(model.classifier(model.features(x)), logits)
    layout = torch.channels_last
    nhwc = model.to(memory_format=layout)(x.to(memory_format=layout))
    torch.testing.assert_close(nhwc, logits, atol=1e-5, rtol=1e-4)


def test_the_last_map_of_the_alexnet():
    with torch.device("meta"):
        model = AlexNet64(num_classes=12).eval()
        x = torch.empty(1, 3, 64, 64)
        assert model.body[:13](x).shape == (1, 256, 1, 1)
        assert [type(layer) for layer in model.body[15:]] == [nn.Dropout, nn.Linear, nn.ReLU] * 2
        assert model(x).shape == (1, 12)


def test_pooling_before_relu_changes_neither_values_nor_gradients():
    x = images(2, (6, 6)).sub_(0.5)
    x[:, :, :2, :2] = -0.25  # ties, and windows without a positive value
    ours, usual = x.clone().requires_grad_(), x.clone().requires_grad_()
    pooled_first = nn.Sequential(*conv_block(nn.Identity(), pool=nn.MaxPool2d(2)))(ours)
    relu_first = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))(usual)
    assert torch.equal(pooled_first, relu_first)
    pooled_first.square().sum().backward()
    relu_first.square().sum().backward()
    assert torch.equal(ours.grad, usual.grad)


def test_a_seed_means_one_model_and_the_global_generator_is_put_back():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = seeded(CNNSmall, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    same, other = seeded(CNNSmall, 3), seeded(CNNSmall, 4)
    assert torch.equal(first.classifier.weight, same.classifier.weight)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)


@pytest.fixture
def user_module(monkeypatch):
    module = types.ModuleType("my_models")

    class Flat(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.linear = nn.Linear(inputs, outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.flatten(1))

    def flat(in_channels, image_size, num_classes, *, extra=0):
        return Flat(in_channels * image_size[0] * image_size[1], num_classes + extra)

    def picky(in_channels, image_size, num_classes):
        return Flat(1, num_classes)

    module.flat, module.picky, module.not_a_model = flat, picky, lambda **_: 3
    monkeypatch.setitem(sys.modules, "my_models", module)


def test_a_users_own_model_is_built_and_left_in_training_mode(user_module):
    model = built_model(factory_at("my_models:flat"), "model my_models:flat", 1, (4, 4), 5)
    assert model.training
    assert model(images(1, (4, 4))).shape == (3, 5)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("my_models", {}),
        ("no_such_module:f", {}),
        ("my_models:flatt", {}),
        ("my_models:picky", {"depth": 3}),
        ("my_models:picky", {}),
        ("my_models:not_a_model", {}),
        ("my_models:flat", {"extra": 2}),
    ],
)
def test_a_users_model_that_cannot_be_used_is_refused(path, options, snapshot, user_module):
    with snapshot.raises(ModelError, f"model {path}: "):
        built_model(factory_at(path), f"model {path}", 1, (4, 4), 5, **options)


class Net(nn.Module):
    """A network that does ``odd`` to its input, or to its logits while it trains, in one of its modes."""

    def __init__(self, odd: str = "", in_mode: str = "both") -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm2d(1), nn.Linear(16, 5)
        self.odd, self.in_mode = odd, in_mode
        self.passes = 0

    def forward(self, x: torch.Tensor) -> object:
        self.passes += 1
        odd = self.odd if self.in_mode in ("both", "training" if self.training else "evaluation") else ""
        if odd == "subtracts":
            x -= 0.5
        elif odd == "past autograd":
            x.data.sub_(0.5)
        elif odd == "first layer":
            x = nn.functional.relu(x, inplace=True)
        elif odd == "fails":
            raise ValueError("no such path")
        logits = self.linear(nn.functional.dropout(self.norm(x), training=self.training).flatten(1))
        return (logits, logits) if odd == "auxiliary" else logits[:, :4] if odd == "fewer" else logits


SHAPE = SetUpTask(5, 1, (4, 4), torch.device("cpu"))


def build(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    return Net("auxiliary", "training")


@pytest.mark.parametrize("odd", ["subtracts", "past autograd", "first layer"])
def test_a_network_that_changes_its_input_is_refused(odd):
    for network in (Net(odd), Net(odd, "evaluation")):
        with pytest.raises(ModelError, match=r"^model odd changes its input in place, so an attack would begin at ot"):
            built_model(lambda made=network, **_: made, "model odd", 1, (4, 4), 5)
    model = built_model(lambda **_: Net(odd, "training"), "model odd", 1, (4, 4), 5)
    with pytest.raises(ModelError, match=r"^model odd: in training mode, it changes its input in place, so an attack "):
        refuse_other_training_mode(model, "model odd", SHAPE)


@pytest.mark.parametrize("odd", ["auxiliary", "fewer", "fails"])
def test_a_network_that_gives_something_else_while_it_trains_is_refused(odd, snapshot):
    with snapshot.raises(ModelError, "model odd: "):
        refuse_other_training_mode(Net(odd, "training").eval(), "model odd", SHAPE)


def test_trying_the_training_mode_leaves_no_trace():
    model = Net().eval()
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    refuse_other_training_mode(model, "model good", SHAPE)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (model.training, model.passes) == (False, 0)


def test_a_network_that_cannot_be_copied_is_not_tried():
    model = Net("auxiliary", "training")
    model.lock = threading.Lock()
    refuse_other_training_mode(model, "model locked", SHAPE)
    assert model.passes == 0


def test_torchscript_is_not_trained(snapshot):
    with snapshot.raises(ModelError, "model scripted: "):
        refuse_other_training_mode(torch.jit.script(nn.Linear(2, 2)), "model scripted", SHAPE)


def test_the_recipe_names_the_network_that_cannot_be_trained(snapshot):
    experiment = tiny_experiment(None, model_args={"model": f"{__name__}:build"})
    with snapshot.raises(ModelError, "the check's recipe: model_args.model: "):
        experiment.build_model(SHAPE, experiment.build_trainer())
    model = experiment.build_model(SHAPE, experiment.build_trainer(), weights_follow=True)  # to be attacked alone
    assert isinstance(model, Net)


@pytest.mark.parametrize(
    ("name", "options", "smallest"),
    [
        ("cnn", {}, 18),
        ("cnn_small", {}, 4),
        *(("cnn_mcmahan", {"padding": padding}, smallest) for padding, smallest in enumerate((16, 10, 4, 1))),
        ("vgg8", {}, 8),
        ("alexnet64", {}, 63),
        ("resnet18", {}, 1),
    ],
)
def test_the_smallest_image_that_the_check_allows_is_the_smallest_that_can_be_built(name, options, smallest):
    entry, _ = Registry.load(entry_points=False).find(ModelEntry, name)
    assert entry.min_size(entry.config(**options)) == smallest
    with torch.device("meta"):
        model = entry.load()(in_channels=1, image_size=(smallest, smallest), num_classes=2, **options).eval()
        assert model(torch.empty(2, 1, smallest, smallest)).shape == (2, 2)
        if smallest > 1:
            text = f"^model {name}: images of {smallest - 1}x90 are too small; the smallest .* is {smallest}x{smallest}"
            with pytest.raises(ModelError, match=text):
                entry.load()(in_channels=1, image_size=(smallest - 1, 90), num_classes=2, **options)


PIXEL_CONVS = [
    pytest.param(3, {"kernel_size": 3}, (9, 12), id="plain"),
    pytest.param(1, {"kernel_size": 3, "padding": 1}, (8, 8), id="padded"),
    pytest.param(3, {"kernel_size": 5, "stride": 3, "padding": 2, "bias": False}, (11, 14), id="stride"),
]


@pytest.mark.parametrize(("channels", "options", "size"), PIXEL_CONVS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_pixel_convolution_is_a_convolution_of_the_same_weights(channels, options, size, memory_format):
    convs = [seeded(lambda kind=kind: kind(channels, 7, **options), 0) for kind in (PixelConv2d, nn.Conv2d)]
    assert convs[0].state_dict().keys() == convs[1].state_dict().keys()
    found = []
    for conv in convs:
        x = images(channels, size).requires_grad_()
        out = conv.to(memory_format=memory_format)(x)
        trained = torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])
        attacked = conv.requires_grad_(False)(x)
        found.append([out, *trained, attacked, *torch.autograd.grad(attacked.clone().relu_().square().sum(), x)])
    for one, other in zip(*(values[:-1] for values in found), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[0][-1], found[1][-1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("options", [options.values[1] for options in PIXEL_CONVS])
def test_the_gradient_of_an_attacked_pixel_convolution_by_differences(options):
    conv = seeded(lambda: PixelConv2d(2, 3, **options), 0).double().requires_grad_(False)
    x = images(2, (7, 6), n=2).double().requires_grad_()
    assert torch.autograd.gradcheck(conv, x)
    assert torch.autograd.gradgradcheck(conv, x)


@every_model
def test_every_built_in_model_begins_with_a_pixel_convolution(model_class, shape, width):
    with torch.device("meta"):
        convs = [module for module in model_class(*shape, 7).modules() if isinstance(module, nn.Conv2d)]
    assert [isinstance(conv, PixelConv2d) for conv in convs] == [True] + [False] * (len(convs) - 1)


@pytest.mark.parametrize("size", [(14, 14), (9, 12), (14, 13)])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_an_attacked_convolution_has_its_columns_of_zeros_written_out_where_that_pays(
    capability, size, precision, monkeypatch
):
    pad, padded, found = nn.functional.pad, [], []
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(base.F, "pad", lambda grad, edges: padded.append(edges) or pad(grad, edges))
    for kind in (UnpaddedConv2d, nn.Conv2d):
        conv = seeded(lambda kind=kind: kind(8, 16, 3), 0).to(memory_format=torch.channels_last).requires_grad_(False)
        x = images(8, size).requires_grad_()
        with torch.autocast("cpu", precision, enabled=precision is not None):
            out = conv(x)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    assert padded == ([(2, 2)] if capability == "AVX2" and size[1] in (12, 14) else [])
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4 if precision is None else 0.05, rtol=1e-5)


@pytest.mark.parametrize("model_class", [CNN, CNNSmall, CNNStrided])
def test_normalisation_follows_each_convolution(model_class):
    for norm, expected in (("none", None), ("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)):
        layers = list(model_class(norm=norm).body)
        after = [layers[i + 1] for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
        assert [isinstance(layer, expected or ()) for layer in after] == [expected is not None] * 3
    assert {layer.num_channels // layer.num_groups for layer in layers if isinstance(layer, nn.GroupNorm)} == {8}


# --- what a network sees of an image ----------------------------------------------------------------------------------

SEEN = [
    pytest.param(CNN, (3, (32, 32)), (30, 30), id="cnn"),
    pytest.param(CNN, (1, (28, 28)), (26, 26), id="cnn-28"),
    pytest.param(CNN, (3, (20, 33)), (18, 30), id="cnn-oblong"),
    pytest.param(CNNMcMahan, (3, (32, 32)), (32, 32), id="cnn_mcmahan"),
    pytest.param(CNNMcMahan, (3, (31, 30)), (28, 28), id="cnn_mcmahan-odd"),
]


@pytest.mark.parametrize(("model_class", "shape", "seen"), SEEN)
def test_a_network_computes_what_its_features_depend_on_and_no_more(model_class, shape, seen):
    model = seeded(lambda: model_class(*shape, 7), 0).double().eval()
    x = images(*shape).double().requires_grad_()
    whole = model.body(x).flatten(1)
    (gradient,) = torch.autograd.grad(whole.square().sum(), x)
    rows, columns = (gradient.abs().sum(dim=axes).nonzero().max() + 1 for axes in ((0, 1, 3), (0, 1, 2)))
    assert (int(rows), int(columns)) == effective_input(model.body, shape[1]) == seen
    sizes = []
    model.body[0].register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape[2:])))
    features = model.features(x)
    assert sizes == [seen]
    torch.testing.assert_close(features, whole)
    torch.testing.assert_close(torch.autograd.grad(features.square().sum(), x), (gradient,))


CONV = nn.Conv2d(3, 4, 3)
POOL = nn.MaxPool2d(2)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([CONV, nn.BatchNorm2d(4), POOL], id="batch statistics are of the whole map"),
        pytest.param([nn.Conv2d(3, 4, 3, padding=1), POOL], id="padding would come in from the cut"),
        pytest.param([nn.Conv2d(3, 4, 2, padding="same"), POOL], id="padding by word"),
        pytest.param([CONV, nn.MaxPool2d(2, padding=1)], id="padded pooling"),
        pytest.param([CONV, nn.MaxPool2d(2, ceil_mode=True)], id="pooling of a part"),
        pytest.param([nn.Conv2d(3, 4, 3, dilation=2), POOL], id="gaps"),
        pytest.param([CONV, nn.MaxPool2d(2, dilation=2)], id="gaps of a pooling"),
        pytest.param([CONV, POOL, nn.AdaptiveAvgPool2d(1)], id="unknown layer"),
        pytest.param([CONV, nn.MaxPool2d(40)], id="no room"),
    ],
)
def test_all_of_an_image_counts_where_a_cut_would_show(layers):
    assert effective_input(nn.Sequential(*layers), (13, 13)) == (13, 13)


def test_windows_need_not_be_square_and_tracked_statistics_show_a_cut_in_training_alone():
    oblong = [nn.Conv2d(3, 4, (3, 2)), nn.ReLU(), nn.MaxPool2d((2, 3), (2, 1)), nn.Flatten(), nn.Linear(8, 2)]
    assert effective_input(nn.Sequential(*oblong), (13, 13)) == (12, 13)
    assert effective_input(nn.ModuleList([CONV, POOL]), (13, 13)) == (13, 13)
    for tracked, seen in ((True, (12, 12)), (False, (13, 13))):
        norm = nn.BatchNorm2d(4, track_running_stats=tracked)
        assert effective_input(nn.Sequential(nn.Conv2d(3, 4, 2), norm, POOL).eval(), (13, 13)) == (13, 13)
        assert effective_input(nn.Sequential(CONV, norm, POOL).eval(), (13, 13)) == seen


@pytest.mark.parametrize("branch", ["clean", "noise"])
def test_only_training_needs_whole_maps_for_its_statistics(branch):
    model = with_dual_norms(CNN())
    assert effective_input(model.body, (32, 32)) == (32, 32)
    assert effective_input(model.eval().body, (32, 32)) == (30, 30)
    x = images(3, (32, 32))
    torch.testing.assert_close(model.features(x), model.body(x).flatten(1))
    getattr(model.body[0].norm, branch).train()
    assert effective_input(model.body, (32, 32)) == (32, 32)
