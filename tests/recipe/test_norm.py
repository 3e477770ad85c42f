"""A change of the norm needs an eps beside it, wherever it is made."""

from __future__ import annotations

import re

import pytest

from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.testing import builtin_registry

LINF, L2 = "{norm: linf, eps: 0.1}", "{norm: l2, eps: 1/2}"


def resolved(threat: str, *overrides: str, groups: str = "[]") -> Experiment:
    text = f"model_args: {{model: cnn_small}}\ncalfat:\n  threat: {threat}\n  clients: {groups}\n"
    return assemble(parse_document(text, "r.yaml").with_overrides(overrides), builtin_registry())


@pytest.mark.parametrize(
    ("threat", "overrides", "place"),
    [
        (LINF, ["calfat.threat.norm=l2"], "--set calfat.threat.norm=l2"),
        (LINF, ["calfat.threat.norm=l2", "calfat.threat.steps=3"], "--set calfat.threat.norm=l2"),
        (LINF, ["calfat.threat={norm: l2}"], "--set calfat.threat={norm: l2}"),
        (L2, ["calfat.threat.norm=linf"], "--set calfat.threat.norm=linf"),
        ("{eps: 0.1}", ["calfat.threat.norm=l1"], "--set calfat.threat.norm=l1"),
        ("{}", ["calfat.threat.norm=l2"], "--set calfat.threat.norm=l2"),
        ("{norm: l2}", [], "r.yaml:3"),
    ],
)
def test_a_norm_without_an_eps_of_its_own_is_refused(threat: str, overrides: list[str], place: str) -> None:
    norm = "linf" if threat == L2 else "l1" if "l1" in place else "l2"
    with pytest.raises(RecipeError, match=f"^{re.escape(place)}: calfat.threat.norm: {norm} needs an eps beside it; "):
        resolved(threat, *overrides)


@pytest.mark.parametrize(
    ("threat", "overrides", "budget"),
    [
        (LINF, ["calfat.threat.norm=l2", "calfat.threat.eps=1/2"], ("l2", 0.5)),
        (LINF, ["calfat.threat.eps=1/2", "calfat.threat.norm=l2"], ("l2", 0.5)),
        (LINF, ["calfat.threat.norm=l2", "calfat.threat.eps=0.1"], ("l2", 0.1)),
        (LINF, ["calfat.threat={norm: l2, eps: 1/2}"], ("l2", 0.5)),
        (LINF, ["calfat.threat.norm=linf"], ("linf", 0.1)),
        (L2, ["calfat.threat.norm=l2"], ("l2", 0.5)),
        (L2, [], ("l2", 0.5)),
        ("{eps: 0.1}", ["calfat.threat.norm=linf"], ("linf", 0.1)),
        ("{norm: linf}", [], ("linf", 8 / 255)),
    ],
)
def test_a_norm_with_its_eps_is_taken(threat: str, overrides: list[str], budget: tuple[str, float]) -> None:
    found = resolved(threat, *overrides).threat
    assert (found.norm, float(found.eps)) == (budget[0], pytest.approx(budget[1]))


def test_a_later_change_may_bring_the_eps() -> None:
    document = parse_document("calfat: {threat: {norm: linf, eps: 0.1}}\n", "r.yaml")
    changed = document.with_overrides(["calfat.threat.norm=l2"])
    assert assemble(changed.with_overrides(["calfat.threat.eps=1/2"]), builtin_registry()).threat.eps == 0.5
    with pytest.raises(RecipeError, match="needs an eps beside it"):  # an earlier one was for the other norm
        assemble(
            document.with_overrides(["calfat.threat.eps=0.2"]).with_overrides(["calfat.threat.norm=l2"]),
            builtin_registry(),
        )


def test_a_group_with_another_norm_has_an_eps_of_its_own() -> None:
    with pytest.raises(RecipeError, match=r"^r\.yaml:4: calfat\.clients\[0\]: calfat\.threat\.norm: l2 needs an eps "):
        resolved(LINF, groups="[{ids: 0, threat: {norm: l2}}]")
    (group,) = resolved(LINF, groups="[{ids: 0, threat: {norm: l2, eps: 1}}]").clients
    assert (group.recipe.threat.norm, group.recipe.threat.eps) == ("l2", 1)
    (group,) = resolved(L2, groups="[{ids: 0, threat: {norm: l2, steps: 3}}]").clients
    assert (group.recipe.threat.norm, group.recipe.threat.eps) == ("l2", 0.5)
