"""The auditor's table of groups: each rule broken by hand once."""

from typing import Any

import msgspec
import pytest
from audit_history import (
    GROUPS_PER_STEP,
    NOTHING_FAILED,
    History,
    broken,
    killed,
    started,
    whole_run,
)

from offbeat.controller.events import (
    Admitted,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    Returned,
    ReturnKind,
    StepApplied,
)
from offbeat.messages.groups import SampleStatus
from offbeat.plugins.simulation.records import (
    Generated,
    PermitsUsed,
    StepReported,
    TrainerApplied,
)


def test_a_whole_legal_run_has_no_violation() -> None:
    assert whole_run().audit() == []


def test_a_violation_says_which_invariant_where_and_the_values() -> None:
    history = whole_run()
    history.change(Dispatched, attempt=7)

    first = history.audit()[0]

    assert str(first).startswith("I1 broken at journal ")
    assert "Dispatched" in first.where and "attempt 7" in first.message


def test_failed_retried_and_recovered_groups_are_legal() -> None:
    history = started()
    first, second = history.admit(), history.admit()
    history.dispatch(first)
    history.give_back(first)
    history.roll_out((first, second))
    history.give_back(second, ReturnKind.RECOVERED)
    history.roll_out((second,))
    history.train((first, second))

    assert killed(history).audit() == []


def test_an_prompt_index_that_is_skipped_breaks_conservation() -> None:
    history = started()
    history.journal.append(Admitted(3, -1))
    assert broken(killed(history)) == {"I1"}


def test_a_dispatch_of_a_group_in_flight_breaks_conservation() -> None:
    history = started()
    prompt_index = history.admit()
    history.dispatch(prompt_index)
    history.dispatch(prompt_index)
    assert broken(killed(history)) == {"I1"}


def test_a_commit_of_an_older_attempt_breaks_conservation() -> None:
    history = started()
    prompt_index = history.admit()
    history.dispatch(prompt_index)
    history.generate(prompt_index)
    history.give_back(prompt_index)
    history.dispatch(prompt_index)
    history.commit(prompt_index)
    assert broken(killed(history)) == {"I1"}


def test_a_commit_of_what_a_former_controller_sent_out_breaks_conservation() -> None:
    history = started()
    prompt_index = history.admit()
    history.dispatch(prompt_index)
    history.generate(prompt_index)
    history.open()
    history.sync()
    history.commit(prompt_index)
    assert broken(killed(history)) == {"I1"}


def test_a_claim_of_a_trained_group_trains_it_twice() -> None:
    history = started()
    history.train(history.ready())
    history.claim((0,))
    assert broken(killed(history)) == {"I2"}


def test_a_step_applied_with_other_groups_than_claimed_breaks_conservation() -> None:
    history = started()
    history.train(history.ready())
    history.change(StepApplied, prompt_indices=(1, 0))
    assert broken(killed(history)) == {"I1"}


def test_a_frontier_that_is_not_what_was_drawn_breaks_conservation() -> None:
    history = started()
    history.train(history.ready())
    history.change(StepApplied, frontier=1)
    assert broken(killed(history)) == {"I1"}


def test_an_unclaimed_group_is_ready_again() -> None:
    history = started()
    prompt_indices = history.ready()
    history.claim(prompt_indices)
    history.unclaim()
    history.train(prompt_indices)
    assert killed(history).audit() == []


def test_a_drop_without_a_known_reason_is_not_accepted() -> None:
    history = started()
    history.drop(history.admit(), "because")
    assert broken(killed(history)) == {"I3"}


def test_more_drops_than_the_budget_allow_no_finished_run() -> None:
    history = started(steps=1)
    history.drop(history.admit())
    history.step()
    history.end()
    assert broken(history) == {"I3"}


def test_a_drop_within_the_budget_is_legal() -> None:
    history = started(steps=1, rollout={"drop_budget": 1})
    history.drop(history.admit())
    history.step()
    history.end()
    assert history.audit() == []


def test_a_filtered_group_is_replaced_not_missed() -> None:
    history = started(steps=1)
    history.drop(history.ready(1)[0], "zero_variance", reason=DropReason.FILTERED)
    history.step()
    history.end()
    assert history.audit() == []

    history.change(Dropped, shrinks=1)
    assert broken(history) == {"I3"}


def test_a_shrunk_step_goes_without_its_dropped_group() -> None:
    settings = {"drop_budget": 1, "on_dropped_prompt": "shrink"}
    history = started(steps=1, rollout=settings)
    first, second = history.admit(), history.admit()
    history.drop(first, shrinks=1)
    history.roll_out((second,))
    history.train((second,))
    history.end()
    assert history.audit() == []


def test_a_group_left_over_at_the_end_is_lost() -> None:
    history = whole_run()
    history.journal.append(Admitted(history.drawn, -1))
    assert broken(history) == {"I3"}


def test_a_group_within_the_bound_is_not_evicted() -> None:
    history = started()
    history.give_back(history.ready(1)[0], ReturnKind.EVICTED)
    assert broken(killed(history)) == {"I3"}


def test_a_group_past_the_bound_is_evicted() -> None:
    history = started()
    late = history.ready(1)[0]
    history.train(history.ready())
    history.sync()
    history.train(history.ready(1) + history.ready(1))
    history.give_back(late, ReturnKind.EVICTED)
    assert killed(history).audit() == []


def test_a_claim_past_the_bound_breaks_staleness() -> None:
    history = started()
    late = history.ready(1)[0]
    history.step()
    history.step()
    history.claim((late,))
    assert broken(killed(history)) == {"I4"}


def test_a_token_of_a_version_not_made_yet_breaks_staleness() -> None:
    history = started()
    history.train(history.ready())
    history.sync()
    history.ready(1)
    # The journal of a controller that lost count of its version.
    history.remove(StepApplied)
    assert "I4" in broken(killed(history))


def test_more_in_flight_than_asked_breaks_permits() -> None:
    history = started(rollout={"max_in_flight": 1})
    for prompt_index in (history.admit(), history.admit()):
        history.dispatch(prompt_index)
    history.end("aborted")
    history.change(PermitsUsed, in_flight=1)
    assert broken(history) == {"I8"}


def test_more_outstanding_than_the_samplers_reach_breaks_permits() -> None:
    history = started()
    for _ in range(5):
        history.admit()
    assert broken(killed(history)) == {"I8"}


@pytest.mark.parametrize(("fresh", "found"), [(4, set[str]()), (5, {"I8"})])
def test_groups_that_wait_since_a_rewind_leave_others_the_samplers_reach(
    fresh: int, found: set[str]
) -> None:
    history = started()
    history.step()
    history.rewind(0)
    for _ in range(fresh):
        history.admit()
    assert broken(killed(history)) == found


def test_a_fuller_buffer_than_its_capacity_breaks_permits() -> None:
    history = started(buffer={"capacity_groups": 2})
    history.ready(3)
    assert broken(killed(history)) == {"I8"}


@pytest.mark.parametrize("field", ["in_flight", "held_groups", "held_bytes"])
def test_what_the_workers_saw_is_held_against_the_limits_too(field: str) -> None:
    history = whole_run()
    history.change(PermitsUsed, **{field: 2**40})
    assert broken(history) == {"I8"}


def test_a_prompt_whose_infrastructure_failed_is_not_dropped_for_its_data() -> None:
    history = started(rollout={"drop_budget": 1})
    prompt_index = history.admit()
    history.dispatch(prompt_index)
    history.give_back(prompt_index)
    history.drop(prompt_index)
    assert broken(killed(history)) == {"I3"}


def test_a_return_of_another_attempt_breaks_conservation() -> None:
    history = started()
    prompt_index = history.admit()
    history.dispatch(prompt_index)
    history.give_back(prompt_index)
    history.change(Returned, attempt=9)
    assert broken(killed(history)) == {"I1"}


def test_a_committed_reward_that_is_not_finite_is_poison() -> None:
    history = started()
    history.ready(1)
    receipt = history.receipts[0]
    bad = msgspec.structs.replace(receipt, rewards=(float("nan"), 1.0))
    history.change(Committed, receipt=bad)
    assert broken(killed(history)) == {"I11"}


def test_a_committed_group_of_too_few_samples_is_poison() -> None:
    history = started()
    history.ready(1)
    bad = msgspec.structs.replace(history.receipts[0], rewards=(1.0,))
    history.change(Committed, receipt=bad)
    assert broken(killed(history)) == {"I11"}


def test_a_controller_that_opens_without_a_higher_fence_is_found() -> None:
    history = started()
    history.incarnation = 0
    history.open()
    assert broken(killed(history)) == {"I13"}


def with_masked(history: History, prompt_index: int, **changes: Any) -> None:
    """Roll out one group of which the receipt says that its first sample is masked."""
    history.dispatch(prompt_index)
    history.generate(prompt_index)
    masked: dict[str, Any] = {
        "statuses": (SampleStatus.MASKED, SampleStatus.VALID),
        "valid_tokens": (0, 3),
    }
    receipt = msgspec.structs.replace(history.receipts[prompt_index], **{**masked, **changes})
    history.receipts[prompt_index] = receipt
    history.commit(prompt_index)


def test_a_masked_sample_where_none_may_be_breaks_the_account_of_samples() -> None:
    history = started()
    with_masked(history, history.admit())
    assert broken(killed(history)) == {"I18"}


@pytest.mark.parametrize(("branches_mean", "violated"), [(1.5, set[str]()), (1.25, {"I18"})])
def test_a_reported_step_whose_record_was_lost_is_recounted_from_what_the_trainer_made(
    branches_mean: float, violated: set[str]
) -> None:
    history = started()
    history.step()
    history.checkpoint()
    history.claim(branched(history))
    history.intend()
    history.trainer_applies()
    history.change(TrainerApplied, branches=((2, 1), (2, 1)))
    history.records.append(StepReported(0.0, 2, 2, 0.0, 0.0, branches_mean, 0.5))
    history.open()
    history.rewind(1)
    history.sync()
    history.train(history.ready())
    history.records.append(StepReported(0.0, 2, 2, 0.0, 0.0, 1.0, 0.0))
    assert broken(killed(history)) == violated


def test_pictures_that_did_not_reach_the_trainer_with_their_group_are_found() -> None:
    history = started()
    pictured(history)
    history.train([*history.ready(GROUPS_PER_STEP - 1), 0])
    assert broken(killed(history)) == {"I18"}


def test_pictures_that_a_receipt_does_not_count_are_found() -> None:
    history = started()
    pictured(history, counted=False)
    assert broken(killed(history)) == {"I18"}


def pictured(history: History, *, counted: bool = True) -> None:
    """Roll out group 0, whose prompt has 48 bytes of pictures."""
    history.dispatch(history.admit())
    history.generate(0)
    history.change(Generated, samples=msgspec.structs.replace(NOTHING_FAILED, media_bytes=48))
    receipt = history.receipts[0]
    if counted:
        tokens = 13 * sum(receipt.response_tokens)
        receipt = msgspec.structs.replace(
            receipt, columns=(*receipt.columns, "media_values"), payload_bytes=tokens + 48
        )
        history.receipts[0] = receipt
    history.commit(0)


def branched(history: History) -> list[int]:
    """Roll out the groups of a step; the first sample of each has two branches."""
    groups = [history.admit() for _ in range(GROUPS_PER_STEP)]
    for prompt_index in groups:
        history.dispatch(prompt_index)
        history.generate(prompt_index)
        branches = (2, 1)
        receipt = msgspec.structs.replace(history.receipts[prompt_index], branches=branches)
        history.receipts[prompt_index] = receipt
        drawn = msgspec.structs.replace(NOTHING_FAILED, branches=branches)
        history.change(Generated, samples=drawn)
        history.commit(prompt_index)
    return groups


def test_a_sample_that_the_trainer_got_unmasked_is_found() -> None:
    history = started(rollout={"on_failed_sample": "mask", "min_valid_samples": 1})
    with_masked(history, history.admit())
    history.train((0, *history.ready(GROUPS_PER_STEP - 1)))
    assert broken(killed(history)) == {"I18"}
