"""Mutated updates of a real run: a server uses them or refuses them by name, and the round goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.fuzz import messages
from tests.fuzz.bench import Bench, Case, bench
from tests.silo.federation import Federation, assert_same_bits
from tests.silo.test_attacks import line_to, request


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mutated_messages_are_used_or_refused(
    tmp_path: Path,
    seed: int,
    share: Callable[[int], int],
    expect_none: Callable[[Bench, Iterable[Case]], None],
) -> None:
    """Each is sent to a server that still waits for a client, and handed to one that takes it for its client's."""
    count = share(500)
    with Federation(tmp_path / "silo", aggregator={"name": "scaffold"}) as federation:
        federation.reports = False
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)
        captured = [(federation.folder / f"sent-{rank}" / "0.safetensors").read_bytes() for rank in (1, 2)]
        with line_to(federation.ports[0]) as send:
            answers = {
                send(request(2, case.files["message.bin"]))[0] for case in messages.cases(seed, count, captured, "")
            }
        assert answers <= {"FAILED_PRECONDITION", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
        federation.let_go()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        recipe = federation.recipe.read_text()
    worker = tmp_path / "bench"
    worker.mkdir()
    (worker / "recipe.yaml").write_text(recipe)
    (worker / "good.bin").write_bytes(captured[0])
    assert "receiver" not in sys.modules
    with bench(worker, "receiver") as runner:
        expect_none(runner, messages.cases(seed, count, captured[1:], "receiver:receive"))
