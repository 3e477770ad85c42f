"""One client of the plain federation: its random streams, batches, attacks and losses.

The numbers in brackets are sections of docs/methods.md. Local training calls torch's kernels in the order in which the
formulas stand, because attacks take signs of gradients: the last bit of a weight can turn one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calfat_plugin.models.norms import using_branch

CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """What is run; the values of the recipe in ``test_federation.py``."""

    method: str
    aggregator: str
    how: dict[str, Any] = field(default_factory=dict)  # options of the method
    mix: dict[str, Any] = field(default_factory=dict)  # options of the aggregator
    seed: int = 3
    rounds: int = 3
    clients: int = 5
    per_round: int = 3
    epochs: int = 2
    batch_size: int = 16
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-3
    alpha: float = 0.3
    partition_seed: int = 2021
    least: int = 10
    padding: int = 1
    eps: float = 0.1
    step: float = 0.05
    steps: int = 2


# --- random streams and data ------------------------------------------------------------------------------------------


def seed_of(seed: int, purpose: str, round: int = 0, client: int = 0, extra: int = 0) -> int:
    text = json.dumps(["calfat-seed-1", seed, purpose, round, client, extra])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") // 2


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none").mean()


def stream(*key: Any) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*key))


def epoch_of(x: Tensor, y: Tensor, s: Setting, key: tuple[Any, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The batches of one epoch: (images, cropped and flipped; labels; positions)."""
    n, draws, side = len(x), stream(*key), x.shape[-1]
    order = torch.randperm(n, generator=draws)
    top, left = (torch.randint(2 * s.padding + 1, (n,), generator=draws) for _ in range(2))
    flip = torch.randint(2, (n,), generator=draws)
    seen = []
    for place, i in enumerate(order.tolist()):
        wide = F.pad(x[i], (s.padding,) * 4)
        image = wide[:, top[place] : top[place] + side, left[place] : left[place] + side]
        seen.append(image.flip(-1) if flip[place] else image)
    starts = list(range(0, n, s.batch_size))
    if len(starts) > 1 and n - starts[-1] == 1:  # batch normalisation cannot train on one example [15.4]
        starts.pop()
    ends = [*starts[1:], n]
    return [(torch.stack(seen[a:b]), y[order[a:b]], order[a:b]) for a, b in zip(starts, ends, strict=True)]


# --- one client -------------------------------------------------------------------------------------------------------


class Client:
    """One client in one round: its model, its data, and the losses of the method."""

    def __init__(self, s: Setting, net: nn.Module, x: Tensor, y: Tensor, round: int, number: int) -> None:
        self.s, self.net, self.x, self.y, self.round, self.number = s, net, x, y, round, number
        counts = torch.tensor([float((y == label).sum()) for label in range(CLASSES)])
        if s.how.get("parameterisation") == "release":  # [2]
            self.k, self.scale, self.log_prior = 0.1, 10.0, (counts.clamp_min(1) + 1e-7).log()
        else:
            self.k, self.scale = 1.0, 1.0
            self.log_prior = ((counts.double() + 1) / counts.double().sum()).log().float()
        roles = s.how.get("roles", "at " * s.clients).split()
        self.lends = roles[number] == "at"
        self.gradient_only = s.method == "standard" or (s.method == "fedrbn" and not self.lends)
        self.gradient_only |= s.method == "fedlat" and round <= s.how["clean_rounds"]

    def calibrated(self, z: Tensor) -> Tensor:
        return z + self.k * self.log_prior

    def rows(self, where: Tensor, noise: torch.Generator) -> Tensor:
        """Which rows of a batch are attacked, (N,) bool [5.3]."""
        if self.s.method != "mixfat":
            return torch.ones(len(where), dtype=torch.bool)
        if self.s.how.get("sampling") == "fixed":
            order = torch.randperm(len(self.x), generator=stream(self.s.seed, "adversarial split", 0, self.number))
            return order[where] < len(self.x) // 2
        return torch.randperm(len(where), generator=noise) < len(where) // 2

    def attack(self, x: Tensor, y: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """(x~, kappa): projected gradient ascent on the model in evaluation mode [1, 4]."""
        s, right = self.s, torch.zeros(len(x))
        self.net.eval()
        if s.method in ("fedtrades", "fedmart", "calfat"):
            x_adv = x + torch.empty_like(x).normal_(generator=noise) * 1e-3
        else:
            x_adv = (x + torch.empty_like(x).uniform_(-s.eps, s.eps, generator=noise)).clamp(x - s.eps, x + s.eps)
            x_adv = x_adv.clamp(0, 1)
        with torch.no_grad():
            clean = self.net(x)
        for _ in range(s.steps):
            x_adv = x_adv.detach().requires_grad_()
            z = self.net(x_adv)
            right += z.argmax(1) == y
            if s.method == "fedtrades":
                objective = F.kl_div(z.log_softmax(1), clean.softmax(1), reduction="sum")
            elif s.method == "calfat":
                aim = self.calibrated(clean).softmax(1)
                objective = F.kl_div(self.calibrated(z).log_softmax(1), aim, reduction="sum")
            else:
                objective = F.cross_entropy(z, y, reduction="sum")
            (gradient,) = torch.autograd.grad(objective, x_adv)
            x_adv = (x_adv.detach() + s.step * gradient.sign()).clamp(x - s.eps, x + s.eps).clamp(0, 1)
        self.net.train()
        return x_adv.detach(), right

    def loss(self, x: Tensor, x_adv: Tensor, y: Tensor, kappa: Tensor) -> Tensor:
        """The mean training loss of a batch [3.2, 5, 17]."""
        s, net = self.s, self.net
        if s.method == "standard":
            return cross_entropy(net(x), y)
        if s.method in ("mixfat", "fedpgd", "fedawp", "fedlat"):
            return cross_entropy(net(x_adv), y)
        if s.method == "calfat":
            return cross_entropy(self.scale * self.calibrated(net(x_adv)), y)
        if s.method == "fedtrades":
            z = net(x)
            natural, z_adv = cross_entropy(z, y), net(x_adv)
            apart = F.kl_div(z_adv.log_softmax(1), z.log_softmax(1), reduction="none", log_target=True)
            return natural + 6 * apart.sum(1).mean()
        if s.method == "fedmart":
            z, z_adv = net(x), net(x_adv)
            log_p, q, one = z.log_softmax(1), z_adv.softmax(1), F.one_hot(y, CLASSES).bool()
            wrong = q.masked_fill(one, -1).amax(1)
            boosted = cross_entropy(z_adv, y) - (1.0001 - wrong).log().mean()
            apart = (log_p.exp() * (log_p - (q + 1e-12).log())).sum(1)
            return boosted + 6 * (apart * (1.0000001 - log_p.exp()[one])).mean()
        if s.method == "fedgairat":
            half = s.steps // 2
            raw = torch.sigmoid(2 * (-1 + 5 * (half - kappa) / half))  # (1 + tanh a) / 2
            w = len(y) * raw / raw.sum() if self.round >= s.how["start_round"] else torch.ones(len(y))
            return (w * F.cross_entropy(net(x_adv), y, reduction="none")).mean()
        with using_branch(net, "clean"):  # fedrbn
            clean = cross_entropy(net(x), y)
        return 0.5 * clean + 0.5 * cross_entropy(net(x_adv), y) if self.lends else clean

    def backward(self, x: Tensor, x_adv: Tensor, y: Tensor, kappa: Tensor) -> float:
        """Leave the gradient of one step in the parameters; the loss."""
        s, net = self.s, self.net
        if s.method == "fedawp" and self.round > s.how["warmup"]:  # [17]
            kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            weights = list(net.parameters())
            slopes = torch.autograd.grad(self.loss(x, x_adv, y, kappa), weights)
            net.load_state_dict(kept)  # statistics count the other pass only
            with torch.no_grad():
                for w, g in zip(weights, slopes, strict=True):
                    if w.dim() > 1:
                        w += 0.005 * w.norm() / g.norm() * g
            loss = self.loss(x, x_adv, y, kappa)
            loss.backward()
            with torch.no_grad():
                for name, w in net.named_parameters():
                    w.copy_(kept[name])
            return float(loss.detach())
        if s.method == "fedrbn" and not self.lends and self.round > s.how["pnc_warmup"]:  # [5.7]
            clean = 0.5 * self.loss(x, x_adv, y, kappa)
            with using_branch(net, "noise", frozen=True):
                borrowed = 0.5 * cross_entropy(net(x), y)
            borrowed.backward()
            nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 10.0)
            clean.backward()
            return float((clean + borrowed).detach())
        loss = self.loss(x, x_adv, y, kappa)
        loss.backward()
        return float(loss.detach())

    def step(self, x: Tensor, y: Tensor, where: Tensor, noise: torch.Generator) -> float:
        x_adv, kappa = x.clone(), torch.zeros(len(x))
        if not self.gradient_only:
            rows = self.rows(where, noise)
            x_adv[rows], kappa[rows] = self.attack(x[rows], y[rows], noise)
        self.net.zero_grad()
        return self.backward(x, x_adv, y, kappa)
