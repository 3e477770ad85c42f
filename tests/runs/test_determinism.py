"""A recipe and its seed say what comes out, bit for bit; nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from calfat_plugin.experiment import assemble
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request, checked_experiment
from calfat_plugin.runs.session import run
from tests.runs.processes import SABOTEUR, WarmServer

MODEL = "model_args.model=tiny_model:build_dropping"  # its dropout draws from a global generator
SETS = ("--set", MODEL, "--set", "train_args.comm_round=2")


def last(run: Path) -> bytes:
    return (run / "checkpoints" / "last.safetensors").read_bytes()


def test_same_recipe_same_bits_whatever_else_differs(
    warm: WarmServer, recipe: Path, monkeypatch: pytest.MonkeyPatch, no_page: None
) -> None:
    """Another process, another folder, a machine of more threads, another state of the global generators."""
    for name, more in (("one", ()), ("other", ()), ("third", ("--seed", "1"))):
        assert warm.run("run", "tiny.yaml", *SETS, *more, "--run-dir", name, cwd=recipe.parent).code == 0
    one, other, third = (last(recipe.parent / name) for name in ("one", "other", "third"))
    assert one == other
    assert one != third

    monkeypatch.syspath_prepend(str(SABOTEUR))
    np.random.seed(99)
    torch.manual_seed(99)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the recipe says one
    document = read_document(recipe).with_overrides([MODEL, "train_args.comm_round=2"])
    here = assemble(document, Registry.load(entry_points=False))
    request = Request(here, recipe.parent / "here", False, [])
    run(request, RunDirectory.open(request), RunObserver())
    torch.set_num_threads(threads)
    assert last(recipe.parent / "here") == one


def test_the_split_follows_the_seed_unless_it_has_one_of_its_own(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SABOTEUR))
    labels = np.arange(200) % 10
    found = []
    for seed, fixed in ((0, []), (1, []), (1, ["calfat.partition.seed=0"])):
        shares = checked_experiment(read_document(recipe), fixed, seed).split(labels)
        found.append([share.tolist() for share in shares])
    assert found[0] == found[2] != found[1]
