"""Staleness policies, filters and drops in a whole run."""

import pytest

from offbeat.controller.errors import EmptyBatch
from offbeat.controller.events import Admitted, Dispatched, Dropped, Opened, Returned
from offbeat.controller.ledger import Ledger
from tests.support.world import IN_ORDER, World, bad_data

SAME_REWARDS = {"rewards": (1.0, 1.0)}


def test_weight_fifo_trains_every_step_in_order_of_weight_version() -> None:
    world = World({"sampler": {"name": "weight_fifo", "max_staleness": 3}})
    world.rollouts.slow = {5: 9.0, 17: 12.0}
    world.run()
    world.assert_ledger_agrees()
    first_dispatch = {event.prompt_index: event.version for event in world.events(Dispatched)}
    trained = [first_dispatch[prompt_index] for prompt_index in world.trained]
    assert trained == sorted(trained)
    assert world.built.state.ledger.counts()["drawn"] == 40


def test_a_mode_that_foresees_lateness_cancels_before_it_is_too_late() -> None:
    sampler = {"name": "windowed", "max_staleness": 1, "over_sampling_ratio": 2.0}

    def cancelled(mode: str) -> int:
        world = World({"sampler": sampler, "sync": {"mode": mode}})
        world.rollouts.slow = dict.fromkeys(range(2, 40, 5), 11.0)
        world.run()
        world.assert_ledger_agrees()
        return sum(event.kind == "cancelled" for event in world.events(Returned))

    assert cancelled("abort_stale") >= cancelled("keep") > 0


def test_the_batch_after_a_refused_step_may_filter_as_many_groups_as_any_other() -> None:
    world = World(
        {
            "steps": 3,
            "sampler": {"name": "in_order", "max_staleness": 0},
            "filters": {"zero_variance": True, "max_per_step": 2},
        }
    )
    world.rollouts.forged = dict.fromkeys(range(100), SAME_REWARDS)
    world.trainer.refuse_steps = {2}
    world.run()
    batches = 3 + 1
    dropped = world.built.state.ledger.totals.dropped
    assert dropped == {"zero_variance": batches * 2, "step_not_applied": 4}


def test_groups_that_ran_out_of_tokens_are_filtered_by_their_share() -> None:
    world = World({"filters": {"max_truncated_fraction": 0.5}})
    world.rollouts.forged = {
        1: {"finish_reasons": ("length", "length")},
        2: {"finish_reasons": ("length", "stop")},
    }
    world.run()
    assert world.built.state.ledger.totals.dropped == {"truncated": 1}
    assert 2 in world.trained and 1 not in world.trained


def test_a_turn_that_ran_out_of_tokens_counts_although_the_last_one_did_not() -> None:
    world = World({"filters": {"max_truncated_fraction": 0.5}})
    world.rollouts.forged = {
        1: {"truncated_turns": (1, 2)},
        2: {"truncated_turns": (1, 0), "finish_reasons": ("stop", "turns")},
    }
    world.run()
    assert world.built.state.ledger.totals.dropped == {"truncated": 1}
    assert 2 in world.trained and 1 not in world.trained
    records = world.telemetry.records
    assert sum(each["rollout/truncated_fraction"] for each in records) == 1 / 8
    assert sum(each["rollout/out_of_turns_fraction"] for each in records) == 1 / 8


def test_the_length_of_a_response_is_what_was_generated_not_what_was_observed() -> None:
    world = World()
    world.rollouts.forged = {each: {"valid_tokens": (1, 2)} for each in range(40)}
    world.run()
    assert {each["rollout/response_tokens_mean"] for each in world.telemetry.records} == {1.5}


@pytest.mark.parametrize("name", ["ready_first", "in_order", "weight_fifo"])
def test_shrunk_steps_train_fewer_groups_but_never_less_than_the_fraction(name: str) -> None:
    world = World(
        {
            "sampler": {"name": name, "max_staleness": 1},
            "rollout": {
                "data_retries": 0,
                "drop_budget": 9,
                "on_dropped_prompt": "shrink",
                "min_step_batch_fraction": 0.75,
            },
        }
    )
    world.rollouts.faults = {prompt_index: [bad_data(prompt_index)] for prompt_index in (0, 1, 2)}
    world.run()
    world.assert_ledger_agrees()
    sizes = [len(step) for step in world.trainer.steps]
    assert min(sizes) == 3 and sum(sizes) < 40
    shrunk = [event for event in world.events(Dropped) if event.shrinks]
    assert sum(sizes) == 40 - len(shrunk)


def test_a_step_whose_prompts_are_all_gone_ends_the_run_by_name() -> None:
    """The source is at its end: nothing can replace them, and later steps cannot go first."""
    world = World(
        {
            "rollout": {"data_retries": 0, "drop_budget": 9},
            "sampler": {"name": "in_order", "max_staleness": 1},
        }
    )
    world.prompts.count = 8
    world.rollouts.faults = {prompt_index: [bad_data(prompt_index)] for prompt_index in range(4)}
    failure = world.fail()
    assert isinstance(failure.causes[0], EmptyBatch)
    assert "step 1" in str(failure)


def test_a_step_without_prompts_ends_the_run_although_later_steps_have_theirs() -> None:
    former = Ledger.fold([Opened("run", 1), Admitted(0, target_step=9)])
    world = World({"sampler": IN_ORDER}, ledger=former, incarnation=2)
    world.prompts.count = 1
    assert isinstance(world.fail().causes[0], EmptyBatch)
