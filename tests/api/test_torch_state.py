"""What the caller has done to torch changes no number, and is as it was afterwards."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import calfat_plugin as calfat
from calfat_plugin import testing
from calfat_plugin.federation.wire import Wire
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host import executors
from calfat_plugin.host.transports.message import bytes_of, tensors_in
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.runs import party, session
from calfat_plugin.testing.federation import TinyFederation
from calfat_plugin.testing.tiny import tiny_experiment
from tests.api.test_in_memory import a_run
from tests.snapshot import TextSnapshot

BACKENDS = torch.backends
#: Public functions that compute nothing by torch, or the same in any state.
NO_DOORS = {"builtin_registry", "derive_seed", "generator", "load_run", "option", "same_bits", "weighted_average"}


def state() -> dict[str, Any]:
    """All that the package may have to change."""
    torch.autocast_increment_nesting()
    return {
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast's depth": torch.autocast_decrement_nesting(),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "default type": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (BACKENDS.cudnn.enabled, BACKENDS.cudnn.benchmark, BACKENDS.cudnn.deterministic),
        "mkldnn": (BACKENDS.mkldnn.enabled, BACKENDS.mkldnn.deterministic),
        "convolutions": (BACKENDS.mkldnn.conv.fp32_precision, BACKENDS.cudnn.conv.fp32_precision),
        "products": (BACKENDS.mkldnn.matmul.fp32_precision, BACKENDS.cuda.matmul.fp32_precision),
        "half": BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }


FRESH = state()


@contextmanager
def switched(switch: Callable[[Any], object], to: object, back: object) -> Iterator[None]:
    switch(to)
    try:
        yield
    finally:
        switch(back)


def backend(owner: Any, name: str, to: object) -> Callable[[], Any]:
    return lambda: switched(lambda value: setattr(owner, name, value), to, getattr(owner, name))


def uncached_autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=on)


STATES: Mapping[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "uncached": uncached_autocast,
    "no_grad": torch.no_grad,
    "float64": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "meta": lambda: switched(torch.set_default_device, "meta", None),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: switched(deterministic, True, False),
    "medium": lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "benchmark": backend(BACKENDS.cudnn, "benchmark", True),
    "no_mkldnn": backend(BACKENDS.mkldnn, "enabled", False),
    "bf16_convolutions": backend(BACKENDS.mkldnn.conv, "fp32_precision", "bf16"),
}
TOGETHER = ("autocast", "no_grad", "float64", "meta", "deterministic", "medium", "no_mkldnn")


@contextmanager
def hostile() -> Iterator[None]:
    """As much as can be at once."""
    with ExitStack() as states:
        for name in TOGETHER:
            states.enter_context(STATES[name]())
        before = state()
        yield
        assert state() == before


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for owner in (BACKENDS.mkldnn.matmul, BACKENDS.cuda.matmul):
        owner.fp32_precision = "none"
    assert state() == FRESH


@pytest.mark.parametrize("name", STATES)
def test_inside_torch_is_as_in_a_new_process_and_afterwards_as_it_was(name: str) -> None:
    with STATES[name]():
        before = state()
        assert before != FRESH
        with fresh_torch_state():
            assert state() == FRESH
            assert torch.zeros(1).add(1).device.type == "cpu"
        assert state() == before
        with suppress(ZeroDivisionError), fresh_torch_state():
            torch.set_default_dtype(torch.float16)  # as a plugin may
            torch.set_autocast_enabled("cpu", True)
            torch.use_deterministic_algorithms(True)
            BACKENDS.cudnn.benchmark = True
            raise ZeroDivisionError
        assert state() == before


def test_whoever_sets_precision_by_torchs_newer_names_finds_it_again() -> None:
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    with fresh_torch_state():
        assert state() == FRESH
    assert BACKENDS.mkldnn.matmul.fp32_precision == "bf16"


def test_weights_in_bfloat16_are_not_those_of_the_step_before() -> None:
    """Torch keeps its copies of weights until the outermost autocast ends."""
    weight = nn.Parameter(torch.ones(1, 1))
    with torch.autocast("cpu", torch.bfloat16), fresh_torch_state():
        for value in (1.0, 2.0):
            weight.data.fill_(value)
            with torch.autocast("cpu", torch.bfloat16):
                assert nn.functional.linear(torch.ones(1, 1), weight).item() == value


def test_inference_mode_is_refused(snapshot: TextSnapshot) -> None:
    with torch.inference_mode(), snapshot.raises(calfat.RunError):
        calfat.load_dataset("digits")


# --- doors ------------------------------------------------------------------------------------------------------------


def public() -> dict[str, Any]:
    found = {name: getattr(home, name) for home in (calfat, testing) for name in home.__all__}
    return {name: value for name, value in found.items() if inspect.isroutine(value)}


#: Every public function but those above, what hosts and workers call, and the one class that makes weights.
DOORS: dict[str, Any] = {name: value for name, value in public().items() if name not in NO_DOORS} | {
    "session.run": session.run,
    "party.run_client": party.run_client,
    "party.train_round": party.train_round,
    "TinyModel": testing.TinyModel,
}


def test_what_is_no_door_is_public_all_the_same() -> None:
    assert set(public()) >= NO_DOORS
    assert {"run", "trust", "evaluate", "attack", "replay", "load_model", "check_model"} <= set(DOORS)


@pytest.mark.parametrize("name", DOORS)
def test_every_door_sets_torch_before_all_else(name: str) -> None:
    """Seen by its refusal, which comes before it looks at its arguments."""
    required = [
        parameter
        for parameter in inspect.signature(DOORS[name]).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    with torch.inference_mode(), pytest.raises(calfat.RunError, match=r"inside torch\.inference_mode\(\)"):
        DOORS[name](*[None] * len(required))


def test_a_node_of_flower_is_a_door() -> None:
    client = pytest.importorskip("calfat_plugin.host.flower.messages", exc_type=ImportError)
    with torch.inference_mode(), pytest.raises(calfat.RunError, match="inference_mode"):
        client.any_client(b"", None)


def tiny_worker() -> Worker:
    """What a process of an executor makes."""
    return TinyFederation(tiny_experiment(testing.builtin_registry(), trainer="fedpgd")).worker


def test_a_worker_of_an_executor_trains_to_the_same_bits() -> None:
    downlink = bytes_of(TinyFederation(tiny_experiment(testing.builtin_registry(), trainer="fedpgd")).server.downlink())

    def trained() -> dict[str, torch.Tensor]:
        executors.started.cache_clear()
        found = executors.train_client(pickle.dumps(tiny_worker), ("", 0), 0, 1, downlink, bytes_of({}))
        assert isinstance(found, executors.Trained), found
        return Wire(tensors_in(found.wire))

    outside = trained()
    with hostile():
        inside = trained()
    with torch.inference_mode():
        refused = executors.train_client(b"", ("", 0), 0, 1, b"", b"")
    executors.started.cache_clear()
    assert testing.same_bits(inside, outside)
    assert isinstance(refused, executors.Failed)
    assert refused.is_users


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> calfat.Run:
    return a_run(tmp_path_factory.mktemp("runs") / "outside")


def numbers(results: Mapping[str, calfat.EvaluationResult]) -> list[Any]:
    return [(label, found.accuracy, found.per_class, found.num_examples) for label, found in results.items()]


def test_a_run_its_model_and_its_evidence(done: calfat.Run, tmp_path: Path) -> None:
    with hostile():
        inside = a_run(tmp_path / "inside")
        model = calfat.load_model(inside.directory)
        replay = calfat.replay(inside.directory)
    file = Path("checkpoints") / "last.safetensors"
    assert (inside.directory / file).read_bytes() == (done.directory / file).read_bytes()
    assert numbers(inside.results) == numbers(done.results)
    assert (replay.stands, replay.doubts) == (True, ())
    assert {(tensor.dtype, tensor.device.type) for tensor in model.parameters()} == {(torch.float32, "cpu")}
    assert testing.same_bits(model.state_dict(), calfat.load_model(done.directory).state_dict())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).eval()


@functools.cache
def images() -> calfat.ImageData:
    few: calfat.ImageData = calfat.load_dataset("digits").test.subset(range(8))
    return few


ATTACKS = ["natural", {"name": "pgd", "steps": 5}, {"name": "autoattack", "iterations": 5, "queries": 20}]


def test_numbers_and_examples_of_a_model_in_memory() -> None:
    model = network()

    def measured() -> Any:
        x_adv = calfat.attack("pgd20", model, images(), eps=0.1)
        return numbers(calfat.evaluate(model, images(), evaluators=ATTACKS, eps=0.1)), x_adv

    outside, x_adv = measured()
    with hostile():
        inside, again = measured()
    assert inside == outside
    assert (again.dtype, again.device.type) == (torch.float32, "cpu")
    assert torch.equal(again, x_adv)


def test_a_model_that_was_made_in_inference_mode_is_measured_and_not_attacked() -> None:
    with torch.inference_mode():
        model = network()
    assert calfat.evaluate(model, images(), evaluators="natural")["natural"].num_examples == 8
    text = r"^evaluator 'pgd20' needs gradients, and the model's tensor '0\.weight' was made inside torch\."
    with pytest.raises(calfat.ModelError, match=text):
        calfat.evaluate(model, images(), evaluators="pgd20", eps=0.1)


def test_a_verdict_on_a_model_in_memory() -> None:
    model = network()
    outside = calfat.trust(model, images(), eps=0.1, examples=6)
    with hostile():
        inside = calfat.trust(model, images(), eps=0.1, examples=6)
    assert inside == outside


def test_data_and_helpers_of_tests() -> None:
    outside = testing.tiny_task()
    with hostile():
        inside = testing.tiny_task()
        digits = calfat.load_dataset("digits")
        testing.check_model("cnn_small", registry=testing.builtin_registry(), image_size=(8, 8))
        mean = calfat.weighted_average([inside.model.state_dict(), outside.model.state_dict()], [1, 3])
    assert digits.train.x.dtype == torch.float32
    assert testing.same_bits(inside.model.state_dict(), outside.model.state_dict())
    assert testing.same_bits(mean, outside.model.state_dict())
    assert torch.equal(inside.data.x, outside.data.x)


def test_a_finding_points_at_the_line_that_called() -> None:
    class Flat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot((x.flatten(1).sum(1) > 20).long(), 10).float() + 0 * x.flatten(1)[:, :10]

    with pytest.warns(UserWarning, match="^[a-z-]+: ") as warned:
        calfat.evaluate(Flat().eval(), images(), evaluators=["natural", "pgd20"], eps=0.1)
    assert {warning.filename for warning in warned} == {__file__}
