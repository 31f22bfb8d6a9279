"""What the ledger promises beside what test_ledger_moves.py finds of any order of moves."""

import pytest

from offbeat.controller.events import (
    AnyEvent,
    Committed,
    Dispatched,
    DropReason,
    ReturnKind,
    StepApplied,
)
from offbeat.controller.group_moves import Place
from offbeat.controller.group_table import MOST_REASONS, OTHER_REASON
from offbeat.controller.ledger import CannotRewind, IllegalMove, Ledger
from offbeat.testing.samplers import RecordedLedger
from tests.support.ledger_model import receipt


def with_ready(count: int, *, version: int = 0, target_step: int | None = None) -> RecordedLedger:
    ledger = RecordedLedger()
    add_ready(ledger, count, version=version, target_step=target_step)
    return ledger


def add_ready(
    ledger: Ledger, count: int, *, version: int = 0, target_step: int | None = None
) -> list[int]:
    prompt_indices = [ledger.admit(target_step) for _ in range(count)]
    for prompt_index in prompt_indices:
        ledger.dispatch(prompt_index, "generator-0", version)
        ledger.commit(receipt(prompt_index, 1, version))
    return prompt_indices


def train(ledger: Ledger, *prompt_indices: int) -> int:
    step = ledger.trainer_version + 1
    ledger.claim(prompt_indices, step, 1)
    ledger.intend(step, 1)
    return ledger.applied(step, 1)


# --- groups ----------------------------------------------------------------------------------------


def test_a_group_is_known_by_the_oldest_token_it_really_has() -> None:
    events = list[AnyEvent]()
    ledger = Ledger(events.append)
    prompt_index = ledger.admit(None)
    assert ledger.dispatch(prompt_index, "generator-0", 3) == 1
    assert ledger.groups[prompt_index].oldest_version == 3, "no token can be older"
    ledger.commit(receipt(prompt_index, 1, version=4))
    assert ledger.groups[prompt_index].oldest_version == 4
    assert isinstance(events[1], Dispatched)
    assert isinstance(events[2], Committed)


def test_the_answer_of_an_attempt_before_the_last_is_refused() -> None:
    ledger = Ledger()
    prompt_index = ledger.admit(None)
    ledger.dispatch(prompt_index, "generator-0", 0)
    ledger.retry(prompt_index, ReturnKind.INFRASTRUCTURE, "engine_lost")
    assert ledger.dispatch(prompt_index, "generator-1", 0) == 2
    with pytest.raises(IllegalMove, match="cannot commit g-000000: it is in_flight, attempt 2"):
        ledger.commit(receipt(prompt_index, 1))


@pytest.mark.parametrize(
    ("claimed", "message"),
    [
        ([0, 2], "cannot claim g-000002: it is admitted, attempt 0"),
        ([0, 9], "cannot claim g-000009: it is trained, dropped or never drawn"),
        ([0, 1, 0], "cannot claim g-000000: it is claimed already"),
    ],
)
def test_a_claim_of_one_wrong_group_claims_none(claimed: list[int], message: str) -> None:
    ledger = with_ready(2)
    ledger.admit(None)
    with pytest.raises(IllegalMove, match=message):
        ledger.claim(claimed, 1, 1)
    assert list(ledger.ready) == [0, 1] and not ledger.training


def test_an_unclaimed_group_is_no_younger_than_before() -> None:
    ledger = with_ready(1, version=2)
    ledger.claim([0], 1, 1)
    ledger.unclaim(1, 1)
    assert ledger.versions == {2: 1}
    assert ledger.groups[0].receipt is not None


def test_a_dropped_prompt_shrinks_the_step_that_is_named_or_none() -> None:
    ledger = Ledger()
    ledger.drop(ledger.admit(3), DropReason.DATA, "too_long", shrinks=3)
    ledger.drop(ledger.admit(3), DropReason.DATA, "too_long")
    assert ledger.batch_deficits == {3: 1}
    assert ledger.totals.failed_prompts == 2


def test_reasons_without_end_are_counted_in_a_bounded_number_of_entries() -> None:
    ledger = Ledger()
    for number in range(1000):
        ledger.drop(ledger.admit(None), DropReason.DATA, f"too slow by {number} ms")
    assert len(ledger.totals.dropped) == MOST_REASONS + 1
    assert ledger.totals.dropped[OTHER_REASON] == 1000 - MOST_REASONS
    assert sum(ledger.totals.dropped.values()) == 1000


# --- steps -----------------------------------------------------------------------------------------


def test_an_applied_step_binds_version_groups_and_the_frontier_of_the_source() -> None:
    events = list[AnyEvent]()
    ledger = Ledger(events.append)
    add_ready(ledger, 3)
    ledger.claim([2, 0], 1, 4)
    assert ledger.applied(1, 4) == 1
    assert events[-1] == StepApplied(
        1, 4, 1, (2, 0), 3, (1, 1), samples=4, tokens=20, reward=0.5, staleness=((-1, 2), (0, 2))
    )
    assert ledger.counts() == {
        "drawn": 3, "admitted": 0, "in_flight": 0, "ready": 1, "training": 0, "trained": 2,
    }  # fmt: skip


def test_a_refused_step_costs_its_groups_and_no_version() -> None:
    ledger = with_ready(2)
    ledger.claim([0, 1], 1, 1)
    ledger.refused(1, 1, "gradient_nan")
    assert ledger.trainer_version == 0
    assert ledger.totals.dropped == {"step_not_applied": 2}
    assert not ledger.groups


def test_after_a_refused_step_every_later_batch_is_trained_one_step_earlier() -> None:
    ledger = Ledger()
    for target_step in (1, 2, 2, 3, None):
        ledger.admit(target_step)
    for prompt_index in (0, 1):
        ledger.dispatch(prompt_index, "generator-0", 0)
        ledger.commit(receipt(prompt_index, 1))
    ledger.drop(2, DropReason.DATA, "too_long", shrinks=2)
    ledger.claim([0], 1, 1)
    ledger.refused(1, 1, "gradient_nan")
    steps = {number: group.target_step for number, group in ledger.groups.items()}
    assert steps == {1: 1, 3: 2, 4: None}
    assert ledger.outstanding_by_target_step == {1: 1, 2: 1, None: 1}
    assert {step: list(ready) for step, ready in ledger.ready_for.items()} == {1: [1]}
    assert ledger.batch_deficits == {1: 1}


def test_what_a_refused_batch_went_without_is_missing_from_no_other() -> None:
    ledger = with_ready(2)
    ledger.drop(ledger.admit(1), DropReason.DATA, "too_long", shrinks=1)
    ledger.claim([0, 1], 1, 1)
    ledger.refused(1, 1, "gradient_nan")
    assert ledger.batch_deficits == {}


# --- rewinds ---------------------------------------------------------------------------------------


def test_a_rewind_gives_back_what_was_trained_since_and_what_newer_weights_sampled() -> None:
    ledger = with_ready(2)
    train(ledger, 0)
    ledger.checkpointed(1, "digest")
    train(ledger, 1)
    older, newer = add_ready(ledger, 2, version=0)[0], add_ready(ledger, 1, version=1)[0]
    waiting = ledger.admit(None)
    assert ledger.rewound(1) == [1, newer]
    assert (ledger.trainer_version, ledger.lineage) == (1, 1)
    assert ledger.totals.trained == 1
    assert older in ledger.ready, "its tokens are of versions that still stand"
    assert ledger.groups[waiting].place is Place.ADMITTED


def test_the_open_step_of_an_abandoned_lineage_is_undone() -> None:
    ledger = with_ready(2)
    train(ledger, 0)
    ledger.claim([1], 2, 1)
    ledger.intend(2, 1)
    assert ledger.rewound(0) == [0, 1], "group 1 has tokens of version 1"
    assert not ledger.training and ledger.intent is None


def test_a_group_given_back_keeps_its_target_step_and_counts_its_attempts_on() -> None:
    ledger = with_ready(1, target_step=1)
    train(ledger, 0)
    assert ledger.rewound(0) == [0]
    assert ledger.groups[0].target_step == 1
    assert ledger.dispatch(0, "generator-0", 0) == 2, "the answer to attempt 1 is refused for good"


def test_a_step_taken_again_after_a_rewind_goes_without_the_same_prompts() -> None:
    ledger = with_ready(2)
    ledger.drop(0, DropReason.DATA, "too_long", shrinks=1)
    train(ledger, 1)
    assert not ledger.batch_deficits
    ledger.rewound(0)
    assert ledger.batch_deficits == {1: 1}


def test_there_is_no_rewind_while_groups_are_in_flight() -> None:
    ledger = RecordedLedger()
    ledger.dispatch(ledger.admit(None), "generator-0", 0)
    with pytest.raises(CannotRewind, match="1 groups are in flight"):
        ledger.rewound(0)


def test_a_rewind_reaches_back_to_the_last_checkpoint_but_one() -> None:
    ledger = with_ready(5)
    for prompt_index in range(5):
        version = train(ledger, prompt_index)
        if version in (2, 3, 4):
            ledger.checkpointed(version, "digest")
    assert ledger.checkpoints == [3, 4]
    with pytest.raises(CannotRewind, match="between version 2 and 5"):
        ledger.rewound(2)
    assert ledger.rewound(3) == [3, 4]
    assert ledger.checkpoints == [3]


def test_a_version_checkpointed_twice_does_not_push_the_one_before_it_out() -> None:
    ledger = with_ready(2)
    for prompt_index in range(2):
        ledger.checkpointed(train(ledger, prompt_index), "digest")
    ledger.checkpointed(2, "digest")
    assert ledger.checkpoints == [1, 2]
    assert ledger.rewound(1) == [1]


# --- snapshots -------------------------------------------------------------------------------------


def test_whoever_waits_is_notified_of_each_move_once_it_is_recorded() -> None:
    seen = list[str]()
    ledger = Ledger(
        lambda event: seen.append(type(event).__name__),
        lambda event: seen.append(f"{event.__name__} changed it"),
    )
    ledger.dispatch(ledger.admit(None), "generator-0", 0)
    assert seen == ["Admitted", "Admitted changed it", "Dispatched", "Dispatched changed it"]


def test_an_illegal_move_notifies_nobody() -> None:
    seen = list[type]()
    ledger = Ledger(changed=seen.append)
    with pytest.raises(IllegalMove):
        ledger.evict(0, "stale")
    assert not seen
