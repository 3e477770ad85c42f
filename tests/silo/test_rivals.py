"""Two processes of one rank: the second is refused by name while the first is alive, and both see why."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.host import launch  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.host.silo.rounds import Presence
from calfat_plugin.host.transports.base import PostponedError
from calfat_plugin.host.transports.message import RefusedError
from tests.silo.federation import Federation, assert_same_bits

TAKEN = "rank 2 is already in use. Two processes cannot be one party: end one of them, or give this one its own --rank"


@pytest.mark.slow
def test_the_second_process_of_a_rank_is_refused_and_both_see_why(tmp_path: Path) -> None:
    """The second listens on another address of this machine, as on another machine."""
    with Federation(tmp_path / "first") as federation, Federation(tmp_path / "second") as other:
        other.recipe.write_text(federation.recipe.read_text().replace("  silo:", "  silo:\n    bind: 127.0.0.5"))
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)
        other.start(2)
        assert other.exit_status(2) == 2
        assert (
            other.output(2).splitlines()[-1]
            == f"error: the server (rank 0, 127.0.0.1:{federation.ports[0]}) refused rank 2: {TAKEN}"
        )
        federation.let_go()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        notice = "warning: another process that says it is rank 2 was refused by the server; end it"
        assert notice in federation.output(2)
        assert f"refused: {TAKEN}" in federation.log(0)
        assert "was started again" not in federation.log(0)


def test_a_process_is_its_rank_until_it_falls_silent() -> None:
    clock, rivals = [0.0], list[tuple[int, str]]()
    presence = Presence(lambda rank, session: rivals.append((rank, session)), lambda: clock[0])
    presence.sign_of_life(1, "first")
    presence.sign_of_life(2, "first")
    for _ in range(2):  # it was just killed, or is about to show that it is alive
        clock[0] += 1.9
        with pytest.raises(PostponedError):
            presence.sign_of_life(1, "second")
    presence.sign_of_life(1, "first")
    with pytest.raises(PostponedError):  # that one may have been under way
        presence.sign_of_life(1, "second")
    presence.sign_of_life(1, "first")
    for name in ("second", "second"):
        with pytest.raises(RefusedError, match=r"^rank 1 is already in use\.") as raised:
            presence.sign_of_life(1, name)
        assert not isinstance(raised.value, PostponedError)
    assert rivals == [(1, "first")] * 2
    clock[0] += 6.1
    presence.sign_of_life(1, "second")  # the first has ended
    with pytest.raises(PostponedError):
        presence.sign_of_life(1, "first")
    assert len(rivals) == 2
