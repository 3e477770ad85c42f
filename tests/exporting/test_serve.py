"""``examples/serve``: what the service says of clean, adversarial and broken requests, on loopback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import calfat_plugin
from calfat_plugin.evaluators.evidence import read_evidence
from tests.cli.runner import ROOT, Ended
from tests.exporting.loopback import ask, serving


@pytest.fixture(scope="module")
def address(finished: Path, first_export: Ended) -> Iterator[str]:
    """Where the service listens, with the export of the run."""
    assert first_export.code == 0, first_export
    command = [sys.executable, "-m", "uvicorn", "service:app", "--port", "PORT", "--log-level", "error"]
    with serving(command, ROOT / "examples" / "serve", MODEL=str(finished / "export")) as service:
        yield f"{service}/predict"


def pixels(images: torch.Tensor) -> bytes:
    return json.dumps({"pixels": images.tolist()}).encode()


def test_clean_images_are_answered_as_the_model_does(finished: Path, address: str) -> None:
    x = calfat_plugin.load_dataset("digits").test.x[:20].float()
    status, answer = ask(address, pixels(x))
    with torch.no_grad():
        logits = calfat_plugin.load_model(finished)(x)
    assert status == 200
    assert answer["classes"] == [str(label) for label in logits.argmax(dim=1).tolist()]
    assert np.abs(np.array(answer["logits"], dtype=np.float32) - logits.numpy()).max() < 1e-4


def test_adversarial_images_fool_it_as_they_fooled_the_model(finished: Path, address: str) -> None:
    evidence = read_evidence(finished / "evidence.safetensors")
    status, answer = ask(address, pixels(evidence.x_adv))
    assert status == 200
    assert answer["classes"] == [str(label) for label in evidence.prediction.tolist()]


ONE = np.zeros((1, 1, 8, 8)).tolist()

BROKEN = {
    "no JSON": (b"pixels", 400),
    "no pixels": (b"{}", 400),
    "a list": (b"[1]", 400),
    "nothing": (b"", 400),
    "words": (b'{"pixels": "all"}', 400),
    "deep": (b'{"pixels": ' + b"[" * 100_000, 400),
    "ragged": (b'{"pixels": [[1], [1, 2]]}', 400),
    "a huge number": (json.dumps({"pixels": [[[[10**400]]]]}).encode(), 400),
    "one number": (b'{"pixels": 1}', 422),
    "no image": (b'{"pixels": []}', 422),
    "another size": (json.dumps({"pixels": np.zeros((1, 1, 9, 8)).tolist()}).encode(), 422),
    "three channels": (json.dumps({"pixels": np.zeros((1, 3, 8, 8)).tolist()}).encode(), 422),
    "no batch": (json.dumps({"pixels": np.zeros((1, 8, 8)).tolist()}).encode(), 422),
    "bytes": (json.dumps({"pixels": np.full((1, 1, 8, 8), 255).tolist()}).encode(), 422),
    "negative": (json.dumps({"pixels": np.full((1, 1, 8, 8), -0.1).tolist()}).encode(), 422),
    "nan": (json.dumps({"pixels": np.full((1, 1, 8, 8), np.nan).tolist()}).encode(), 422),
    "infinite": (json.dumps({"pixels": np.full((1, 1, 8, 8), np.inf).tolist()}).encode(), 422),
    "too long": (b" " * 10_000_001, 413),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_requests_are_the_senders_fault(address: str, what: str) -> None:
    body, expected = BROKEN[what]
    status, answer = ask(address, body)
    assert status == expected
    assert isinstance(answer["detail"], str)
    assert ask(address, json.dumps({"pixels": ONE}).encode())[0] == 200, "it still answers"
