"""Updates that are out of proportion: used, for no rule here takes a client's vote away, but never in silence."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

#: Times the median norm from which an update is reported: a choice, not a measured bound. Honest norms differ with
#: their number of steps and their classes; an update scaled to replace the mean of n clients is n times as long.
RATIO = 10.0
_FEWEST = 3  # clients; of two, nobody can say which is out of proportion


def norm_alarms(norms: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for each client whose update is more than :data:`RATIO` times as long as the round's median.

    Args:
        norms: client id to the L2 norm of its update.
    """
    middle = median(norms.values()) if len(norms) >= _FEWEST else 0.0
    if middle <= 0:
        return ()
    return tuple(
        f"the update of client {client} has the norm {norm:.3g}, {norm / middle:.0f} times the median of its round"
        for client, norm in norms.items()
        if norm > RATIO * middle
    )
