from types import SimpleNamespace
from typing import cast

from offbeat.controller.ledger import Ledger
from offbeat.controller.rollouts import BufferBounds
from offbeat.controller.state import RunState
from offbeat.transfer_queue.index import QueueIndex


def test_one_more_group_fits_exactly_while_groups_and_bytes_stay_within_their_bounds() -> None:
    ledger, queue = Ledger(), QueueIndex()
    state = cast("RunState", SimpleNamespace(ledger=ledger, queue=queue))
    bounds = BufferBounds(capacity_groups=3, capacity_bytes=100, max_group_bytes=20)
    for _ in range(2):
        ledger.dispatch(ledger.admit(None), "generator-0", 0)
    assert bounds.has_room(state, 0)
    assert not bounds.has_room(state, 1), "the third place is for the group that waits"
    queue.put(9, 1, ("response_ids",), 40, None)
    assert bounds.has_room(state, 0), "40 bytes, and 20 for each of three groups"
    queue.put(10, 1, ("response_ids",), 1, None)
    assert not bounds.has_room(state, 0)
