"""Attackers that see the honest clients' updates of the round, and hide among them or turn their mean around."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from calfat_plugin.attackers.own_update import with_parameters
from calfat_plugin.entries import AttackerEntry, paper
from calfat_plugin.interfaces import Attacker, AttackTask, State
from calfat_plugin.options import option


@dataclass(frozen=True)
class ALIEOptions:
    """Options of "a little is enough"."""

    z: float | None = option(
        None, low=0, help="standard deviations away from the honest mean; null: as many as hide the attackers"
    )


class ALittleIsEnough(Attacker):
    """mean - z std of the honest models in each coordinate (Baruch et al., NeurIPS 2019, algorithm 3)."""

    options: ALIEOptions

    def sent(self, task: AttackTask) -> State:
        import torch

        honest = task.honest().values()
        z = self.options.z
        if z is None:
            z = hidden_deviations(len(honest) + task.num_attackers, task.num_attackers)
        sent = {}
        for name in task.parameter_names:
            rows = torch.stack([state[name].double() for state in honest])
            sent[name] = rows.mean(0) - z * rows.std(0, correction=0)
        return with_parameters(task, sent)


def hidden_deviations(clients: int, attackers: int) -> float:
    """z: the largest deviation beyond which enough honest clients lie for a majority with the attackers; >= 0.

    phi(z) < (n - m - s) / (n - m) with s = floor(n / 2 + 1) - m; of n clients m attack.
    """
    honest = clients - attackers
    supporters = max(0, clients // 2 + 1 - attackers)
    share = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(min(max(share, 0.001), 0.999)))


@dataclass(frozen=True)
class IPMOptions:
    """Options of the inner-product attack."""

    epsilon: float = option(0.5, low=0, open_low=True, help="how many times the honest mean, turned around")


class InnerProduct(Attacker):
    """theta - epsilon (mean of the honest models - theta) (Xie et al., UAI 2019, section 4)."""

    options: IPMOptions

    def sent(self, task: AttackTask) -> State:
        import torch

        honest = task.honest().values()
        sent = {}
        for name in task.parameter_names:
            start = task.global_state[name].double()
            mean = torch.stack([state[name].double() for state in honest]).mean(0)
            sent[name] = start - self.options.epsilon * (mean - start)
        return with_parameters(task, sent)


ENTRIES = (
    AttackerEntry(
        "alie",
        build=ALittleIsEnough,
        config=ALIEOptions,
        sees_honest=True,
        summary="a little is enough: as far from the honest mean as still looks honest",
        formula="mean - z std of the honest models",
        citation=paper("baruch2019little"),
    ),
    AttackerEntry(
        "ipm",
        build=InnerProduct,
        config=IPMOptions,
        sees_honest=True,
        summary="inner-product manipulation: a multiple of the honest mean, turned around",
        formula="theta - epsilon (mean_honest - theta)",
        citation=paper("xie2019fall"),
    ),
)
