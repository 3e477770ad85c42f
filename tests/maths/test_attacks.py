from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from calfat_plugin.errors import ModelError
from calfat_plugin.evaluators.gradient import CW, CWOptions
from calfat_plugin.maths.attacks import attack_mode, buffers_kept, gradient_ascent, momentum
from calfat_plugin.maths.losses import cross_entropy, kl_divergence
from calfat_plugin.threat import ThreatModel

FEW = settings(max_examples=30, deadline=None, derandomize=True)
W = torch.tensor([[1.0, -2.0], [-1.0, 1.0]])
X = torch.tensor([[0.5, 0.5]])
Y = torch.tensor([0])


def linear(x: Tensor) -> Tensor:
    return x @ W.T


def climb_ce(logits: Tensor) -> Tensor:
    return cross_entropy(logits, Y, "sum")


def pgd(model=linear, x=X, loss=climb_ce, threat=None, steps=10, start=None, **rest) -> Tensor:
    threat = threat or ThreatModel()
    return gradient_ascent(
        model,
        x,
        loss,
        threat=threat,
        steps=steps,
        step_size=rest.pop("step_size", float(threat.step_size)),
        start=x if start is None else start,
        **rest,
    )


def cw(kappa: float) -> CW:
    return CW(CWOptions(kappa=kappa))


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


class TestVectors:
    def test_first_gradient(self):
        x = X.clone().requires_grad_()
        climb_ce(linear(x)).backward()
        assert x.grad.flatten().tolist() == pytest.approx([-1.244919, 1.867378], abs=1e-6)

    @pytest.mark.parametrize(
        ("steps", "expected"),
        [(0, (0.5, 0.5)), (1, (0.492157, 0.507843)), (4, (0.468627, 0.531373)), (10, (0.468627, 0.531373))],
    )
    def test_steps(self, steps, expected):
        assert pgd(steps=steps).flatten().tolist() == pytest.approx(expected, abs=1e-6)

    def test_the_divergence_is_stuck_at_x(self):
        nat = linear(X)
        x_adv = pgd(loss=lambda z: kl_divergence(nat, z, "sum"))
        assert torch.equal(x_adv, X)

    def test_fgsm_is_one_step_of_eps(self):
        x_adv = pgd(steps=1, step_size=8 / 255)
        assert x_adv.flatten().tolist() == pytest.approx([0.5 - 8 / 255, 0.5 + 8 / 255])

    def test_cw_without_kappa_stops_when_broken_and_continues_with_it(self):
        # z_0 - z_1 = 2 x_0 - 3 x_1: from 0.05 each step of 2/255 takes 0.0392, so two steps break
        # it.
        x = torch.tensor([[0.775, 0.5]])
        stopped = pgd(x=x, loss=lambda z: cw(0.0).loss(z, Y))
        moving = pgd(x=x, loss=lambda z: cw(50.0).loss(z, Y))
        assert (stopped - x).flatten().tolist() == pytest.approx([-4 / 255, 4 / 255], abs=1e-6)
        assert (moving - x).flatten().tolist() == pytest.approx([-8 / 255, 8 / 255], abs=1e-6)

    def test_cw_gradient_stops_at_the_boundary_without_kappa(self):
        wrong = torch.tensor([[0.0, 2.0]]).requires_grad_()
        cw(0.0).loss(wrong, Y).backward()
        assert wrong.grad.tolist() == [[0.0, 0.0]]
        right = torch.tensor([[2.0, 0.0]]).requires_grad_()
        cw(0.0).loss(right, Y).backward()
        assert right.grad.tolist() == [[-1.0, 1.0]]


class TestLoop:
    @FEW
    @given(
        norm=st.sampled_from(["linf", "l2", "l1"]),
        eps=st.floats(0, 1),
        step_size=st.floats(1e-3, 2),
        steps=st.integers(0, 4),
        kind=st.sampled_from(["clean", "random", "gaussian", "far"]),
        seed=st.integers(0, 10**6),
    )
    def test_always_inside_the_budget(self, norm, eps, step_size, steps, kind, seed):
        threat = ThreatModel(norm=norm, eps=eps)
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(3, 1, 4, 4, generator=generator).round(decimals=1)
        start = {
            "clean": x,
            "random": threat.random_start(x, generator),
            "gaussian": threat.gaussian_start(x, generator, std=0.001),
            "far": x + 3,
        }[kind]
        model, y = small_net(seed).eval(), torch.tensor([0, 1, 2])
        before = x.clone(), start.clone()
        x_adv = gradient_ascent(
            model, x, lambda z: cross_entropy(z, y, "sum"), threat=threat, steps=steps, step_size=step_size, start=start
        )
        threat.check(x_adv, x, who="pgd")
        assert not x_adv.requires_grad
        assert torch.equal(before[0], x)
        assert torch.equal(before[1], start)

    @pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
    def test_climbs(self, norm):
        model, y = small_net().eval(), torch.tensor([0, 1, 2])
        x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        threat = ThreatModel(norm=norm, eps=0.1 if norm == "linf" else 0.4, step_size=0.05)
        x_adv = pgd(model, x, lambda z: cross_entropy(z, y, "sum"), threat)
        gained = cross_entropy(model(x_adv), y, "none") - cross_entropy(model(x), y, "none")
        assert (gained > 0).all()

    def test_examples_do_not_influence_each_other(self):
        model, y = small_net().eval().double(), torch.tensor([0, 1, 2])
        x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
        together = pgd(model, x, lambda z: cross_entropy(z, y, "sum"))
        alone = [pgd(model, x[i : i + 1], lambda z, i=i: cross_entropy(z, y[i : i + 1], "sum")) for i in range(3)]
        assert torch.allclose(together, torch.cat(alone))

    def test_leaves_parameter_gradients_alone(self):
        model, y = small_net().eval(), torch.tensor([0])
        x = torch.full((1, 1, 4, 4), 0.5)
        pgd(model, x, lambda z: cross_entropy(z, y, "sum"))
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_result_shares_no_storage_with_its_inputs(self):
        x = X.clone()
        for steps in (0, 1):
            pgd(x=x, start=x, steps=steps).add_(9)
        assert torch.equal(x, X)

    def test_sees_the_start_and_iterates_but_not_the_end(self):
        seen: list[list[float]] = []

        def watched(logits: Tensor) -> Tensor:
            seen.append(logits.flatten().tolist())
            return climb_ce(logits)

        pgd(loss=watched, steps=2)
        after_one = linear(pgd(steps=1)).flatten().tolist()
        assert seen == [linear(X).flatten().tolist(), pytest.approx(after_one)]

    def test_a_model_that_detaches_is_named(self, snapshot):
        with snapshot.raises(ModelError):
            pgd(model=lambda x: linear(x.detach()))


@pytest.mark.parametrize(("decay", "second"), [(1.0, (-0.25, -0.25)), (0.5, (-0.625, -0.125)), (0.0, (-1.0, 0.0))])
def test_a_step_keeps_a_share_of_the_gradients_before(decay: float, second: tuple[float, float]) -> None:
    steer = momentum(decay)
    first = steer(torch.tensor([[3.0, -1.0], [0.0, 0.0]]))
    assert first.tolist() == [[0.75, -0.25], [0.0, 0.0]]  # 1 long in L1; nothing where there is no gradient
    assert steer(torch.tensor([[-2.0, 0.0], [1e-38, 0.0]])).tolist() == [list(second), [1.0, 0.0]]


def test_steering_decides_where_a_step_goes():
    threat = ThreatModel(eps=0.1, step_size=0.1)
    plain, opposite = (pgd(steps=1, threat=threat, steering=steering) for steering in (None, torch.neg))
    torch.testing.assert_close(plain - X, X - opposite)
    assert not torch.equal(plain, X)


class TestAttackMode:
    def mixed_net(self) -> nn.Sequential:
        model = small_net().train()
        model[1].eval()  # a user froze this layer
        model[4].bias.requires_grad_(False)
        return model

    def state(self, model: nn.Module):
        return (
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
        )

    def test_inside_everything_evaluates_and_no_parameter_wants_gradients(self):
        model = self.mixed_net()
        with attack_mode(model) as inside:
            assert inside is model
            assert self.state(model) == ([False] * 6, [False] * 6)

    @pytest.mark.parametrize("fail", [False, True])
    def test_restores_exactly(self, fail):
        model = self.mixed_net()
        before = self.state(model)
        try:
            with attack_mode(model):
                if fail:
                    raise KeyError
        except KeyError:
            assert fail
        assert self.state(model) == before
        assert before[0] == [True, True, False, True, True, True]
        assert before[1] == [True] * 5 + [False]

    def test_batch_statistics_stay_put(self):
        model, y = small_net().train(), torch.tensor([0, 1])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with attack_mode(model):
            pgd(model, torch.rand(2, 1, 4, 4), lambda z: cross_entropy(z, y, "sum"))
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())


def test_buffers_are_put_back_after_an_exception_too():
    norm = nn.BatchNorm1d(2).train()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}

    def looking_that_fails() -> None:
        with buffers_kept(norm):
            norm(torch.ones(3, 2))
            assert norm.num_batches_tracked.item() == 1
            raise RuntimeError("of a test")

    with pytest.raises(RuntimeError, match=r"^of a test$"):
        looking_that_fails()
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
