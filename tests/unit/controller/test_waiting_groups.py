"""Order of the groups that are dispatched again."""

from offbeat.controller.events import DropReason
from offbeat.controller.waiting_groups import WaitingGroups
from tests.support.virtual_time import run
from tests.support.world import World


async def two_due() -> tuple[World, WaitingGroups]:
    world = World()
    ledger = world.controller().state.ledger
    waiting = WaitingGroups(world.built.state)
    for prompt_index in (ledger.admit(None), ledger.admit(None)):
        waiting.again(prompt_index)
    return world, waiting


def test_the_lowest_prompt_index_of_a_step_is_due_first() -> None:
    _, waiting = run(two_due())
    due = waiting.next_due()
    assert due is not None and due.prompt_index == 0
    assert [waiting.pop_due(), waiting.pop_due()] == [0, 1]
    assert waiting.next_due() is None


async def test_a_group_that_was_dropped_while_due_is_passed_over() -> None:
    world, waiting = await two_due()
    world.built.state.ledger.drop(0, DropReason.DATA)
    for _ in range(2):  # asking changes nothing
        due = waiting.next_due()
        assert due is not None and due.prompt_index == 1
    assert waiting.pop_due() == 1
    assert waiting.next_due() is None


async def test_each_group_is_due_once_however_often_it_is_made_due() -> None:
    _, waiting = await two_due()
    waiting.again(0)
    assert [waiting.pop_due(), waiting.pop_due()] == [0, 1]
    assert waiting.next_due() is None


async def test_a_group_of_the_step_in_progress_goes_first_after_a_refused_step_has_moved_its_batch() -> (
    None
):
    world = World({"sampler": {"name": "in_order", "max_staleness": 3}})
    ledger = world.controller().state.ledger
    waiting = WaitingGroups(world.built.state)
    for target_step in (3, 2):
        waiting.again(ledger.admit(target_step))
    ledger.refused(1, 1, "gradient norm is nan")
    waiting.reorder()
    waiting.again(ledger.admit(1))
    assert [waiting.pop_due() for _ in range(3)] == [1, 2, 0]


async def test_a_trial_in_an_outage_leaves_room_for_groups_of_earlier_steps() -> None:
    world = World({"sampler": {"name": "in_order", "max_staleness": 3}})
    ledger = world.controller().state.ledger
    waiting = WaitingGroups(world.built.state)
    later, earlier = ledger.admit(1), ledger.admit(0)
    for prompt_index in (later, earlier):  # the later step was tried longest ago
        waiting.after_all_others(prompt_index)
    assert waiting.before(1) == 1, "a group that was tried waits as one that backs off"
    assert waiting.next_trial(lambda others: others < 1) == earlier, "room for one group"
    assert waiting.pop_trial(lambda others: others < 2) == later, "room for both"
    assert waiting.pop_trial(lambda others: others < 1) == earlier
    assert waiting.next_trial(lambda _: True) is None
