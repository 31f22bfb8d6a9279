"""Keys of step attempts and sync epochs, over incarnations of the controller."""

from offbeat.messages.fences import Fence
from tests.support.virtual_time import run
from tests.support.world import World

A_LONG_RUN = 10_000_000  # steps, each with an attempt and a sync


async def first_key(incarnation: int) -> int:
    state = World(incarnation=incarnation).controller().state
    assert state.fence == Fence("run", incarnation)
    return state.first_of_incarnation


def test_no_key_of_a_long_incarnation_reaches_those_of_the_next() -> None:
    assert run(first_key(1)) + 10 * A_LONG_RUN < run(first_key(2))


def test_the_keys_of_the_last_of_very_many_incarnations_are_exact_in_json() -> None:
    assert run(first_key(1_000_000)) + A_LONG_RUN < 2**53
