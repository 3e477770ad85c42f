"""Table 6.3 in numbers: what each method with each loss modifier minimises and climbs, on given logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calfat_plugin.maths.losses import cross_entropy, kl_divergence
from calfat_plugin.modifiers.robal import cosine_logits
from tests.methods.helpers import (
    COUNTS,
    Z_ADV,
    Z_NAT,
    F,
    Y,
    attack_batch,
    build_method,
    build_modifier,
    local_task,
    train_batch,
)

HALF = [True, False]  # sample 0 adversarial, sample 1 clean
#: The vectors of docs/methods.md 16 are of this floor; calfat and these modifiers have another default.
FLOOR = {"delta": 1e-6}
WITH_FLOOR = {"calfat", "calibrated", "logitadj", "robal"}


def with_floor(method: str, loss: str, options=None, loss_options=None):
    """The method with the floor of the vectors, wherever it has one."""
    options = (FLOOR if method in WITH_FLOOR else {}) | dict(options or {})
    loss_options = (FLOOR if loss in WITH_FLOOR else {}) | dict(loss_options or {})
    return build_method(method, loss, loss_options, **options)


def trained(method: str, loss: str = "plain", *, options=None, loss_options=None, **batch) -> float:
    built = with_floor(method, loss, options, loss_options)
    return built.train_loss(train_batch(built.bind_loss(COUNTS), **batch)).item()


@pytest.mark.parametrize(
    ("method", "loss", "options", "attacked", "expected"),
    [
        ("standard", "plain", {}, [False, False], 1.008304),
        ("fedpgd", "plain", {}, None, 1.794655),
        ("fedpgd", "calibrated", {}, None, 1.689054),
        ("fedpgd", "logitadj", {}, None, 1.689054),  # the same function; the attacks differ
        ("mixfat", "plain", {}, HALF, 1.379121),
        ("mixfat", "calibrated", {}, HALF, 1.196701),
        ("mixfat", "logitadj", {}, HALF, 1.196701),
        ("fedtrades", "plain", {}, None, 2.066370),
        ("fedtrades", "calibrated", {}, None, 1.982322),
        ("fedtrades", "logitadj", {}, None, 1.914419),
        ("fedtrades", "plain", {"beta": 0.0}, None, 1.008304),
        ("fedmart", "plain", {}, None, 3.305194),
        ("fedmart", "plain", {"lam": 5.0}, None, 3.214729),
        ("fedmart", "calibrated", {}, None, 3.495665),
        ("fedmart", "logitadj", {}, None, 3.305194 - 1.794655 + 1.689054),  # the classification part alone
        ("calfat", "plain", {"adv_ratio": 0.5}, HALF, 1.196701),  # the prior is in both parts
    ],
)
def test_outer_loss(method, loss, options, attacked, expected):
    assert trained(method, loss, options=options, attacked=attacked) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "options", "lam", "round", "expected"),
    [
        ("fedgairat", {"start_round": 3}, -1.0, 3, 2.236810),
        ("fedgairat", {"start_round": 3}, -1.0, 2, 1.794655),  # not yet: plain adversarial training
        ("fedgairat", {"start_round": 1}, math.inf, 1, 1.794655),
    ],
)
def test_gairat_weights_from_its_start_round_on(method, options, lam, round, expected):
    from calfat_plugin.threat import ThreatModel

    task = local_task(round=round, threat=ThreatModel(steps=10))
    found = trained(method, options={**options, "lam": lam}, kappa=[0, 10], task=task)
    assert found == pytest.approx(expected, abs=1e-4)


# --- the modifiers by themselves --------------------------------------------------------------------------------------

TAIL = torch.tensor([50, 30, 20, 10])
COSINES = torch.tensor([[0.3, 0.5, 0.1, -0.2]])


@pytest.mark.parametrize(
    ("modifier", "options", "logits", "y", "expected"),
    [
        ("plain", {}, F, 0, 1.495182),
        ("plain", {}, F, 1, 0.495182),
        ("plain", {}, F, 3, 3.495182),
        ("logitadj", FLOOR, F, 0, 1.064934),
        ("fedlc", {}, F, 0, 1.445845),
        ("fedlc", {"tau": 0.5}, F, 0, 1.470339),
        ("gear", {"delta": 0.5}, F, 0, 1.763709),
        ("robal", FLOOR, COSINES, 0, 2.790071),
        ("robal", FLOOR, COSINES, 3, 9.911228),
        ("robal", {"tau_b": 1.2, "tau_m": 0.0, **FLOOR}, COSINES, 0, 2.485412),
        ("calibrated", FLOOR, F, 0, 1.055560),
        ("calibrated", FLOOR, F, 3, 16.177928),
        ("calibrated", {"delta": 1e-2}, F, 0, 1.066327),
        ("calibrated", {"delta": 1e-2}, F, 3, 6.998152),
        ("calibrated", {"parameterisation": "release"}, F, 0, 9.489251),
        ("calibrated", {"parameterisation": "release"}, F, 1, 7.593e-5),
        ("calibrated", {"parameterisation": "release"}, F, 2, 15.405542),
        ("calibrated", {"parameterisation": "release"}, F, 3, 33.401276),
    ],
)
def test_modified_cross_entropy(modifier, options, logits, y, expected):
    """The calibrated one with a class that the client lacks."""
    loss = build_modifier(modifier, **options).bind(COUNTS if modifier == "calibrated" else TAIL)
    assert loss.cross_entropy(logits, torch.tensor([y])).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("modifier", ["calibrated", "logitadj", "robal"])
@pytest.mark.parametrize(
    ("counts", "shares"),
    [
        ([3, 1, 0, 0], [1, 0.5, 0.25, 0.25]),
        ([200, 50, 0, 0], [0.804, 0.204, 0.004, 0.004]),
        ([0, 2000, 0, 0], [0.0005, 1.0005, 0.0005, 0.0005]),
    ],
    ids=["4 examples", "250 examples", "2000 examples"],
)
def test_the_floor_of_a_prior_is_one_example_of_the_client(modifier, counts, shares):
    """(n_y + 1) / n, whatever n is. The vectors above are of 100 examples, where it is 0.01."""
    loss = build_modifier(modifier).bind(torch.tensor(counts))
    assert loss.log_prior.exp().tolist() == pytest.approx(shares, rel=1e-5)


def test_fedlc_takes_missing_classes_out_of_the_softmax():
    loss = build_modifier("fedlc").bind(COUNTS)
    logits = torch.zeros(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss.cross_entropy(logits, torch.tensor([0])).sum(), logits)
    assert abs(gradient[0, 3].item()) < 1e-30
    assert gradient[0, 1].item() > 0.1


@pytest.mark.parametrize(
    ("modifier", "y", "expected"),
    [
        ("calibrated", 0, 1.066327),
        ("calibrated", 1, 0.564165),
        ("calibrated", 2, 2.453630),
        ("calibrated", 3, 6.998152),
        ("logitadj", 0, 1.066327),
        ("logitadj", 3, 6.998152),
    ],
)
def test_the_usual_floor_is_one_example_of_the_client(modifier, y, expected):
    """Worked out by hand from the prior (51, 31, 21, 1) / 100; a floor of 1e-6 would give the missing class 16.18."""
    loss = build_modifier(modifier).bind(COUNTS)
    assert loss.cross_entropy(F, torch.tensor([y])).item() == pytest.approx(expected, abs=1e-5)


# --- what attacks climb -----------------------------------------------------------------------------------------------

CE_ADV = cross_entropy(Z_ADV, Y, reduction="sum").item()
CCE_ADV = 2 * 1.689054
KL = 0.101830 + 0.250858


@pytest.mark.parametrize(
    ("method", "loss", "expected"),
    [
        ("fedpgd", "plain", CE_ADV),
        ("fedpgd", "logitadj", CE_ADV),
        ("fedpgd", "fedlc", CE_ADV),
        ("fedpgd", "gear", CE_ADV),
        ("fedpgd", "fedrs", CE_ADV),
        ("fedpgd", "robal", CE_ADV),  # raw cosines, scale 1
        ("fedpgd", "calibrated", CCE_ADV),
        ("mixfat", "calibrated", CCE_ADV),
        ("fedmart", "plain", CE_ADV),
        ("fedmart", "logitadj", CE_ADV),
        ("fedmart", "robal", CE_ADV),
        ("fedmart", "calibrated", CCE_ADV),
        ("fedgairat", "plain", CE_ADV),
        ("fedtrades", "plain", KL),
        ("fedtrades", "logitadj", KL),
        ("fedtrades", "robal", KL),
        ("fedtrades", "calibrated", 2 * 0.187662),
    ],
)
def test_inner_loss(method, loss, expected):
    built = with_floor(method, loss)
    assert built.attack_loss(attack_batch(built.bind_loss(COUNTS))).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("modifier", ["calibrated", "logitadj", "robal"])
def test_calibrate_inner_can_be_switched(modifier):
    with_prior = build_modifier(modifier, calibrate_inner=True, **FLOOR).bind(COUNTS)
    without = build_modifier(modifier, calibrate_inner=False).bind(COUNTS)
    assert torch.equal(without.attack_logits(Z_ADV), Z_ADV)
    shift = with_prior.attack_logits(Z_ADV)
    tau = {"calibrated": 1.0, "logitadj": 1.0, "robal": 1.5}[modifier]
    scale = {"calibrated": 1.0, "logitadj": 1.0, "robal": 10.0}[modifier]
    assert torch.allclose(shift, scale * Z_ADV + tau * (COUNTS / 100 + 1e-6).log())


# --- RoBal's cell, worked out from its parts --------------------------------------------------------------------------


def test_robal_with_trades_keeps_the_divergence_on_bare_cosines():
    method = with_floor("fedtrades", "robal")
    loss = method.bind_loss(COUNTS)
    expected = loss.cross_entropy(Z_NAT, Y).mean() + 6 * kl_divergence(Z_NAT, Z_ADV)
    assert trained("fedtrades", "robal") == pytest.approx(expected.item(), abs=1e-5)


def test_robal_with_mart_takes_probabilities_from_scaled_cosines():
    from calfat_plugin.trainers.fedmart import margin, regulariser

    loss = with_floor("fedmart", "robal").bind_loss(COUNTS)
    expected = loss.cross_entropy(Z_ADV, Y).mean() + margin(10 * Z_ADV, Y) + 6 * regulariser(10 * Z_NAT, 10 * Z_ADV, Y)
    assert trained("fedmart", "robal") == pytest.approx(expected.item(), rel=1e-5)


def test_robal_replaces_the_classifier_and_keeps_its_weight(snapshot):
    from calfat_plugin.errors import ModelError
    from tests.methods.helpers import TinyNet, tiny_data

    model = TinyNet()
    weight = model.classifier.weight.detach().clone()
    adapted = build_modifier("robal").adapt_model(model)
    x = tiny_data().x
    expected = cosine_logits(model.body(x), weight, gamma=1 / 32)
    assert torch.allclose(adapted(x), expected)
    assert [name for name, _ in adapted.named_parameters() if "classifier" in name] == ["classifier.weight"]
    assert adapted(x).abs().max() < 1
    with snapshot.raises(ModelError):
        build_modifier("robal").adapt_model(torch.nn.Sequential(torch.nn.Flatten()))


# --- CalFAT's ablations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "outer", "inner"),
    [
        ({}, 1.689054, 2 * 0.187662),
        ({"outer": "plain"}, 1.794655, 2 * 0.187662),
        ({"inner": "kl"}, 1.689054, KL),
        ({"inner": "ce"}, 1.689054, CE_ADV),
    ],
)
def test_calfat_and_its_ablations(options, outer, inner):
    method = with_floor("calfat", "plain", options)
    loss = method.bind_loss(COUNTS)
    assert method.train_loss(train_batch(loss)).item() == pytest.approx(outer, abs=1e-4)
    assert method.attack_loss(attack_batch(loss)).item() == pytest.approx(inner, abs=1e-4)


# --- properties -------------------------------------------------------------------------------------------------------

logits = st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4).map(lambda row: torch.tensor([row]))
counts = st.lists(st.integers(0, 500), min_size=4, max_size=4).filter(any).map(torch.tensor)


@given(logits, logits, st.integers(1, 1000), st.integers(0, 3))
def test_a_uniform_prior_calibrates_nothing(nat, adv, each, label):
    y = torch.tensor([label])
    loss = build_modifier("calibrated").bind(torch.full((4,), each))
    plain = build_modifier("plain").bind(torch.full((4,), each))
    assert torch.allclose(loss.cross_entropy(adv, y), plain.cross_entropy(adv, y), atol=1e-5)
    assert torch.allclose(
        kl_divergence(loss.attack_logits(nat), loss.attack_logits(adv)), kl_divergence(nat, adv), atol=1e-5
    )


@given(logits, counts, st.integers(0, 3))
def test_release_is_the_paper_on_ten_times_the_logits(row, class_counts, label):
    y = torch.tensor([label])
    release = build_modifier("calibrated", parameterisation="release").bind(class_counts)
    as_paper = build_modifier("calibrated", delta=1e-12).bind(class_counts.clamp_min(1))
    assert torch.allclose(release.cross_entropy(row, y), as_paper.cross_entropy(10 * row, y), rtol=1e-4, atol=1e-4)


@given(logits, counts, st.integers(0, 3))
@pytest.mark.parametrize("modifier", ["plain", "logitadj", "robal", "calibrated", "fedlc", "gear", "fedrs"])
def test_losses_are_finite_and_inputs_untouched(modifier, row, class_counts, label):
    loss = build_modifier(modifier).bind(class_counts)
    before = row.clone()
    y = torch.tensor([label])
    found = [loss.cross_entropy(row, y), loss.attack_logits(row), loss.kl_logits(row), loss.margin_logits(row)]
    assert all(tensor.isfinite().all() for tensor in found)
    assert torch.equal(row, before)
