"""A plain federation: what docs/methods.md says, in loops and without the package, to hold the package's own runs to.

From the package come only FedRBN's layers with two branches, which are part of a model; the images are handed in. Every
random number is drawn here, from seeds that are made by the rule of docs/determinism.md. ``client.py`` has the local
training. The numbers in brackets are sections of docs/methods.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calfat_plugin.models.norms import dual_norms, with_dual_norms
from tests.reference.client import CLASSES, Client, Setting, epoch_of, seed_of, stream
from tests.reference.models import Expanded, Tiny
from tests.reference.robust import robust

ROBUST = (
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "centered_clipping",
    "norm_clipping",
)


def split(labels: Any, s: Setting) -> list[list[int]]:
    """The Dirichlet partition of the release [10]."""
    rng = np.random.RandomState(s.partition_seed)
    hands: list[list[int]] = [[]]
    while min(map(len, hands)) < s.least:
        hands = [[] for _ in range(s.clients)]
        for label in range(CLASSES):
            members = np.array([i for i in range(len(labels)) if labels[i] == label])
            rng.shuffle(members)
            shares = rng.dirichlet([s.alpha] * s.clients)
            shares *= [len(hand) < len(labels) / s.clients for hand in hands]
            cuts = (np.cumsum(shares / shares.sum()) * len(members)).astype(int)[:-1]
            for hand, piece in zip(hands, np.split(members, cuts), strict=True):
                hand += piece.tolist()
    for hand in hands:
        rng.shuffle(hand)
    return hands


class Federation:
    """Server and clients. ``state`` and ``losses`` are those after the last round."""

    def __init__(self, s: Setting, x: Tensor, y: Tensor) -> None:
        self.s, self.x, self.y = s, x, y
        self.parts = split(y.tolist(), s)
        self.net = self.fresh()
        self.state = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        norms = dual_norms(self.net)
        self.personal = [f"{layer}.{key}" for layer, norm in norms.items() for key in norm.state_dict()]
        self.shared = [name for name, p in self.net.named_parameters() if p.requires_grad and name not in self.personal]
        self.own: dict[int, dict[str, Tensor]] = {}  # personal tensors [5.7]
        self.lent: list[dict[str, Tensor]] = []  # the at clients' states of the last round
        zeros = {name: torch.zeros_like(self.state[name]) for name in self.shared}
        self.c = dict(zeros)  # SCAFFOLD [7.3]
        self.c_of = {client: dict(zeros) for client in range(s.clients)}
        self.weights = {name: nn.Parameter(self.state[name].clone()) for name in self.shared}
        self.optimizer = server_optimizer(s.aggregator, list(self.weights.values()))
        self.center = [0.0] * sum(self.state[name].numel() for name in self.shared)  # of centered clipping [7.6]
        self.clients: list[int] = []
        self.losses: dict[int, float] = {}

    def fresh(self) -> nn.Module:
        torch.manual_seed(seed_of(self.s.seed, "weights"))
        net = Tiny(1, (self.x.shape[-2], self.x.shape[-1]), CLASSES)
        if self.s.method in ("fedrbn", "fedlat"):
            net = with_dual_norms(net) if self.s.method == "fedrbn" else Expanded(net)
        for weight in net.parameters():
            if weight.dim() == 4:  # channels last in memory [1]: another order of sums in the kernels
                weight.data = torch.stack([kernel.movedim(0, -1).clone() for kernel in weight.data]).movedim(-1, 1)
        return net

    def play(self, round: int) -> None:
        """One round."""
        s = self.s
        draw = np.random.default_rng(seed_of(s.seed, "sample clients", round))
        self.clients = sorted(draw.choice(s.clients, s.per_round, replace=False).tolist())
        before, after, self.losses, changes = self.state, {}, {}, {}
        for client in self.clients:
            after[client], self.losses[client], changes[client] = self.train(client, round)
        self.state = self.combined(before, after, changes, round)
        if self.personal:
            self.state |= self.evaluated_personal(after)

    def adopt(self, state: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        """Take the last bits of another federation's means, where a half may have been rounded the other way."""
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.c |= c
        for name, p in self.weights.items():
            p.data.copy_(state[name])

    def train(self, number: int, round: int) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
        """(the client's model, its mean loss in the last epoch, the change of its variate)."""
        s, net = self.s, self.net
        net.load_state_dict({**self.state, **self.own.get(number, {})})
        net.train()
        part = self.parts[number]
        client = Client(s, net, self.x[part], self.y[part], round, number)
        if s.method == "fedrbn" and not client.lends:
            net.load_state_dict(borrowed(net.state_dict(), self.lent), strict=False)
        start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        if isinstance(net, Expanded) and round > s.how["clean_rounds"] and not net.linear:
            net.origin.load_state_dict(net.network.state_dict())
            net.linear = 1
        named, n, steps = {name: p for name, p in net.named_parameters() if name in self.shared}, len(part), 0
        gradient: dict[str, Tensor] = {}
        if s.mix.get("variant") == "I":
            gradient = self.whole_gradient(client, named, start)
        sgd = torch.optim.SGD(net.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
        for epoch in range(s.epochs):
            noise, total = stream(s.seed, "attack", round, number, epoch), 0.0
            for x, y, where in epoch_of(client.x, client.y, s, (s.seed, "batches", round, number, epoch)):
                total += client.step(x, y, where, noise) * len(y)
                steps += 1
                for name, p in named.items():
                    if s.aggregator == "fedprox":
                        p.grad += s.mix["mu"] * (p.detach() - start[name])
                    if s.mix.get("pairing") == "gradient":
                        p.grad += self.c[name] - self.c_of[number][name]
                sgd.step()
                if s.aggregator == "scaffold" and s.mix.get("pairing") != "gradient":
                    for name, p in named.items():
                        p.data.sub_(self.c[name] - self.c_of[number][name], alpha=s.lr)
        state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
        self.own[number] = {name: state[name] for name in self.personal}
        changes = {}
        if s.aggregator == "scaffold":
            rho, k = s.momentum, steps
            a = (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho) if s.mix.get("pairing") == "gradient" else k
            for name in self.shared:
                own = self.c_of[number][name]
                new = gradient.get(name, own - self.c[name] + (start[name] - state[name]) / (a * s.lr))
                changes[name], self.c_of[number][name] = new - own, new
        return state, total / n, changes

    def whole_gradient(
        self, client: Client, named: dict[str, nn.Parameter], start: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Gradient of the client's whole loss at x, attack and weight decay included [7.3]."""
        s, key = self.s, (self.s.seed, "full gradient batches", client.round, client.number)
        gradient = {name: s.weight_decay * start[name] for name in named}
        noise = stream(s.seed, "full gradient attack", client.round, client.number)
        for x, y, where in epoch_of(client.x, client.y, s, key):
            client.step(x, y, where, noise)
            for name, p in named.items():
                gradient[name].add_(p.grad, alpha=len(y) / len(client.x))
        client.net.load_state_dict(start)
        return gradient

    def combined(
        self, before: dict[str, Tensor], after: dict[int, dict[str, Tensor]], changes: dict[int, Any], round: int
    ) -> dict[str, Tensor]:
        """The next global model [7]."""
        s, clients = self.s, self.clients
        even = s.aggregator in ("scaffold", "sfat") or s.mix.get("weights") == "uniform"
        shares = {client: 1.0 if even else float(len(self.parts[client])) for client in clients}
        if s.aggregator == "sfat" and round >= 2:
            shares[min(clients, key=lambda client: self.losses[client])] *= 1.4
        whole = sum(shares.values())
        state = {}
        for name, tensor in before.items():
            mean = sum(shares[client] / whole * after[client][name].double() for client in clients)
            assert isinstance(mean, Tensor)
            state[name] = (mean if tensor.is_floating_point() else mean.round()).to(tensor.dtype)
        if s.aggregator == "scaffold":
            for name in self.shared:
                moves = sum((after[client][name] - before[name]).double() for client in clients)
                state[name] = (before[name].double() + s.mix.get("server_lr", 1.0) / len(clients) * moves).float()
                total = sum(changes[client][name].double() for client in clients)
                self.c[name] = (self.c[name].double() + total / s.clients).float()
        if s.aggregator in ROBUST:
            moved = [[after[c][name].double() - before[name].double() for name in self.shared] for c in clients]
            rows = [torch.cat([each.flatten() for each in row]).tolist() for row in moved]
            by = torch.tensor(robust(s.aggregator, rows, s.mix, self.center), dtype=torch.float64)
            self.center = by.float().tolist()
            for name, step in zip(self.shared, by.split([before[n].numel() for n in self.shared]), strict=True):
                state[name] = (before[name].double() + step.view(before[name].shape)).float()
            own = s.aggregator if s.aggregator == "trimmed_mean" else "median"
            for name in before.keys() - set(self.shared):
                seen = [after[client][name].double().flatten().tolist() for client in clients]
                middle = torch.tensor(robust(own, seen, s.mix, [])).view(before[name].shape)
                state[name] = (middle if before[name].is_floating_point() else middle.round()).to(before[name].dtype)
        if self.optimizer is not None:
            for name, p in self.weights.items():
                p.grad = before[name] - state[name]
            self.optimizer.step()
            state |= {name: p.detach().clone() for name, p in self.weights.items()}
        return state

    def evaluated_personal(self, after: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """FedRBN: what clients keep, averaged for evaluation once the st clients have borrowed [5.7]."""
        roles = self.s.how.get("roles", "at " * self.s.clients).split()
        lent = [after[client] for client in self.clients if roles[client] == "at"]
        kept = [
            {**after[client], **(borrowed(after[client], lent) if roles[client] == "st" else {})}
            for client in self.clients
        ]
        self.lent = lent
        mean = {name: sum(state[name].double() / len(kept) for state in kept) for name in self.personal}
        return {
            name: (tensor if self.state[name].is_floating_point() else tensor.round()).to(self.state[name].dtype)
            for name, tensor in mean.items()
        }


def borrowed(own: dict[str, Tensor], lent: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Noise statistics for an st client: the at clients', weighted by how alike the clean ones are [5.7]."""
    if not lent:
        return {}
    clean = [name for name in own if ".clean.running" in name]
    alike = [
        sum(float(F.cosine_similarity(own[name].double(), state[name].double(), dim=0)) for name in clean)
        / (len(clean) * 0.01)
        for state in lent
    ]
    raw = [math.exp(score - max(alike)) for score in alike]
    shares = [weight / sum(raw) for weight in raw]
    return {
        name: sum(share * state[name].double() for share, state in zip(shares, lent, strict=True)).float()
        for name in (one.replace(".clean.", ".noise.") for one in clean)
    }


class Yogi:
    """As Adam, with v <- v - (1 - b2) g^2 sign(v - g^2) [7.5]."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights, self.steps = weights, 0
        self.m, self.v = ([torch.zeros_like(p) for p in weights] for _ in range(2))

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for p, m, v in zip(self.weights, self.m, self.v, strict=True):
            g = p.grad
            assert g is not None
            m.lerp_(g, 0.1)
            v.sub_((v - g * g).sign() * (g * g), alpha=0.01)
            root = (v / (1 - 0.99**self.steps)).sqrt() + 1e-3
            p.addcdiv_(m, root, value=-0.01 / (1 - 0.9**self.steps))


def server_optimizer(aggregator: str, weights: list[nn.Parameter]) -> Any:
    if aggregator == "fedadam":
        return torch.optim.Adam(weights, lr=0.01, betas=(0.9, 0.99), eps=1e-3, foreach=False)
    if aggregator == "fedadagrad":
        return torch.optim.Adagrad(weights, lr=0.01, eps=1e-3, foreach=False)
    return Yogi(weights) if aggregator == "fedyogi" else None
