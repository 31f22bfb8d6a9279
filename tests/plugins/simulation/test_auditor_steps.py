"""The auditor on steps, rewinds and checkpoints: each rule broken by hand once."""

from typing import Any

import pytest
from audit_history import ENGINE, History, broken, killed, run_config, started, whole_run

from offbeat.config.run import CheckpointConfig
from offbeat.controller.events import (
    Checkpointed,
    Claimed,
    Rewound,
    Served,
    StepApplied,
    StepIntent,
    Unclaimed,
)
from offbeat.plugins.simulation.records import (
    CheckpointLatest,
    CheckpointWritten,
    Closed,
    ControllerEnd,
    EngineServes,
    Fault,
    TrainerApplied,
    TrainerRestored,
    TrainerStarted,
)


def rewound() -> History:
    """Three steps, a checkpoint of version 1, the trainer lost after version 2."""
    history = started()
    history.step()
    history.checkpoint()
    undone = history.ready()
    history.train(undone)
    history.sync()
    history.rewind(1)
    history.sync()
    history.roll_out(undone)
    history.train(undone)
    history.sync()
    history.step()
    history.end()
    return history


# --- what is trained -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{"minibatches": (0, 1)}, {"minibatches": (0,)}, {"epochs": 2}, {"minibatches": (1, 1)}],
)
def test_minibatches_and_epochs_that_the_recipe_does_not_ask_for_are_found(
    other: dict[str, object],
) -> None:
    history = whole_run()
    history.change(TrainerApplied, 0, **other)
    assert broken(history) == {"I2"}


def test_a_step_that_only_the_ledger_counts_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.book_applied()
    assert broken(killed(history)) == {"I2"}


def test_a_step_whose_record_was_lost_may_be_adopted_by_the_next_incarnation() -> None:
    history = started(steps=1)
    history.claim(history.ready())
    history.intend()
    history.trainer_applies()
    history.open()
    history.book_applied()
    history.sync()
    history.end()
    assert history.audit() == []


def test_a_step_whose_record_was_lost_may_not_be_trained_again() -> None:
    history = started(steps=1)
    prompt_indices = history.ready()
    history.claim(prompt_indices)
    history.intend()
    history.trainer_applies()
    history.open()
    history.sync()
    history.unclaim()
    history.claim(prompt_indices)
    history.intend()
    history.trainer_applies()
    assert "I2" in broken(killed(history))


def test_a_trainer_that_holds_a_step_the_ledger_gave_up_is_found_at_the_end() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.trainer_applies()
    history.unclaim()
    assert broken(killed(history)) == {"I2"}


def test_an_unknown_outcome_is_legal_when_the_run_fails_there() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.trainer_applies()
    assert killed(history).audit() == []


def test_a_group_trained_twice_by_the_trainers_own_word_is_found() -> None:
    history = started()
    history.step()
    history.train(history.ready())
    history.change(TrainerApplied, prompt_indices=(0, 3))
    assert "I2" in broken(killed(history))


def test_another_set_of_groups_than_the_trainer_says_is_found() -> None:
    history = whole_run()
    history.change(TrainerApplied, prompt_indices=(4, 6))
    assert {"I2", "I7"} == broken(history)


def test_a_run_that_finishes_early_has_lost_steps() -> None:
    history = started(steps=3)
    history.step()
    history.end()
    assert broken(history) == {"I3"}
    assert broken(history, prompts=2) == set()
    assert broken(history, prompts=4) == {"I3"}


def test_a_short_step_ends_the_data() -> None:
    history = started()
    history.step()
    history.train(history.ready(1))
    history.sync()
    history.end()
    assert broken(history, prompts=3) == set()


def test_a_short_step_in_the_middle_has_lost_groups() -> None:
    history = started()
    history.train(history.ready(1))
    history.sync()
    history.step()
    history.step()
    history.end()
    assert broken(history) == {"I3"}


def test_a_step_claims_no_more_than_it_has_room_for() -> None:
    history = started()
    history.claim(history.ready(3))
    assert broken(killed(history)) == {"I3"}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        pytest.param({"oldest": (2, 0)}, {"I4", "I6"}, id="tokens past the bound"),
        pytest.param({"newest": (2, 3)}, {"I4"}, id="tokens newer than the weights"),
        pytest.param({"attempts": (1, 2)}, {"I6"}, id="another attempt than the receipt's"),
        pytest.param({"poison": ("", "nan logprobs")}, {"I11"}, id="a poisoned group"),
    ],
)
def test_groups_that_are_wrong_by_the_trainers_word_alone_are_found(
    said: dict[str, Any], found: set[str]
) -> None:
    history = whole_run()
    history.change(TrainerApplied, **said)
    assert broken(history) == found


# --- versions --------------------------------------------------------------------------------------


def test_a_version_that_is_not_one_more_is_found() -> None:
    history = started()
    history.train(history.ready())
    history.change(StepApplied, version=2)
    assert {"I5", "I2"} == broken(killed(history))


def test_a_trainer_that_skips_a_version_is_found() -> None:
    history = started()
    history.train(history.ready())
    history.change(TrainerApplied, version=2, oldest=(0, 0))
    assert {"I5", "I2"} == broken(killed(history))


def test_an_engine_that_goes_back_a_version_is_found() -> None:
    history = started()
    history.step()
    history.records.append(EngineServes(0.0, ENGINE, history.engine_incarnation, 9, 0, "w0"))
    assert broken(killed(history)) == {"I5"}


def test_an_engine_that_acks_an_older_version_than_before_is_found() -> None:
    history = started()
    history.step()
    history.journal.append(Served(ENGINE, history.engine_incarnation, 1, 0, "w0"))
    assert broken(killed(history)) == {"I5"}


# --- steps apply once ------------------------------------------------------------------------------


def test_a_step_without_a_durable_intent_is_found() -> None:
    history = started()
    history.train(history.ready())
    history.remove(StepIntent)
    assert broken(killed(history)) == {"I7"}


def test_a_step_over_other_groups_than_intended_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.claimed.pop()
    history.trainer_applies()
    assert broken(killed(history)) == {"I7"}


def test_a_step_applied_twice_by_the_trainer_is_found() -> None:
    history = started()
    history.train(history.ready())
    history.records.append(history.records[-1])
    assert "I7" in broken(killed(history))


def test_a_refused_step_leaves_the_version() -> None:
    history = started(steps=1)
    history.claim(history.ready())
    history.intend()
    history.refuse()
    history.step()
    history.end()
    assert history.audit() == []


def test_a_group_that_is_admitted_to_a_batch_which_a_refused_step_has_filled_is_found() -> None:
    for admitted, expected in ((2, set[str]()), (1, {"I3"})):
        history = started(steps=2, sampler={"name": "in_order", "max_staleness": 1})
        first = [history.admit(1) for _ in range(2)]
        later = [history.admit(2) for _ in range(2)]
        history.roll_out([*first, *later])
        history.claim(first)
        history.intend()
        history.refuse()  # the groups bound to step 2 are step 1's now
        history.admit(admitted)
        assert broken(killed(history)) == expected


def test_a_run_that_ends_without_a_group_for_a_refused_step_is_found() -> None:
    history = started(steps=1)
    history.claim(history.ready())
    history.intend()
    history.refuse()
    error = "run failed at step 1, trainer version 0: EmptyBatch: step 1 has no prompt group left"
    history.end("failed", error, "EmptyBatch")
    assert broken(history) == {"I9"}


def test_a_refused_step_that_the_trainer_applied_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.trainer_applies()
    history.refuse()
    assert {"I7", "I2"} == broken(killed(history))


def test_an_attempt_that_is_used_twice_is_found() -> None:
    history = started()
    history.step()
    history.claim(history.ready())
    history.change(Claimed, attempt=1)
    assert broken(killed(history)) == {"I7"}


def test_a_claim_for_another_step_than_the_next_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.change(Claimed, step=2)
    assert broken(killed(history)) == {"I7"}


def test_a_claim_while_another_attempt_is_open_is_found() -> None:
    history = started()
    history.claim(history.ready(1))
    history.claimed = []  # and the next claim is of another attempt
    history.claim(history.ready(1))
    assert broken(killed(history)) == {"I7"}


def test_an_abort_of_another_step_than_the_open_one_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.unclaim()
    history.change(Unclaimed, step=2)
    assert broken(killed(history)) == {"I7"}


def test_a_step_that_is_intended_twice_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.intend()
    assert broken(killed(history)) == {"I7"}


def test_an_intent_of_another_attempt_than_the_open_one_is_found() -> None:
    history = started()
    history.claim(history.ready())
    history.intend()
    history.change(StepIntent, attempt=9)
    assert broken(killed(history)) == {"I7"}


# --- checkpoints and rewinds -----------------------------------------------------------------------


def test_a_rewind_trains_again_what_was_undone() -> None:
    assert rewound().audit() == []


def test_a_ready_group_of_an_abandoned_version_is_not_trained() -> None:
    history = started()
    history.checkpoint()
    history.step()
    kept = history.ready(1)
    history.rewind(0)
    history.sync()
    history.roll_out((0, 1))
    history.train((0, 1))
    history.sync()
    history.train(kept + history.ready(1))
    assert broken(killed(history)) == {"I1"}


def test_a_group_sampled_from_abandoned_weights_of_the_same_number_is_not_trained() -> None:
    history = started()
    history.checkpoint()
    history.step()
    abandoned = history.digests[1]
    history.rewind(0)
    history.sync()
    history.roll_out((0, 1))
    history.train((0, 1))
    history.sync()
    serves = EngineServes(0.0, ENGINE, history.engine_incarnation, history.epoch, 1, abandoned)
    history.records.append(serves)
    history.train(history.ready())
    assert broken(killed(history)) == {"I6"}


def test_a_ready_group_of_a_kept_version_stays_ready_over_a_rewind() -> None:
    history = started()
    history.checkpoint()
    early = history.ready(1)
    history.train(history.ready(2))
    history.rewind(0)
    history.sync()
    history.train(early + history.ready(1))
    assert killed(history).audit() == []


@pytest.mark.parametrize(("told", "found"), [(True, set[str]()), (False, {"I2"})])
def test_a_trainer_that_is_started_anew_is_missed_unless_its_run_was_over(
    told: bool, found: set[str]
) -> None:
    history = whole_run()
    at = next(i for i, record in enumerate(history.records) if isinstance(record, ControllerEnd))
    history.records[at:at] = [
        *[Closed(0.0, "trainer")] * told,
        Fault(0.0, "trainer_killed", "trainer"),
        TrainerStarted(0.0, 2),
    ]
    assert broken(history) == found


def test_a_rewind_that_the_trainer_did_not_make_is_found() -> None:
    history = started()
    history.step()
    history.journal.append(Rewound(1, 1, "nothing happened"))
    history.journal.append(Rewound(0, 2, "nothing happened"))
    assert "I2" in broken(killed(history))


def test_a_rewind_that_forgets_what_it_undoes_is_found() -> None:
    history = started()
    history.step()
    history.checkpoint()
    history.step()
    history.rewind(1)
    history.change(Rewound, undone=())
    assert "I1" in broken(killed(history))


def test_a_group_that_is_in_flight_over_a_rewind_is_found() -> None:
    history = started()
    history.step()
    history.dispatch(history.admit())
    history.rewind(0)
    assert broken(killed(history)) == {"I1"}


def test_a_rewind_of_another_lineage_than_the_next_is_found() -> None:
    history = rewound()
    history.change(Rewound, lineage=7)
    assert "I5" in broken(history)


def test_a_step_within_a_rewind_that_is_never_finished_is_found() -> None:
    history = rewound()
    history.change(Rewound, rewinding_to=0)
    assert {"I5", "I7"} <= broken(history)


def test_a_restore_to_a_checkpoint_that_was_never_written_is_found() -> None:
    history = rewound()
    history.change(TrainerRestored, digest="of another run")
    assert "I12" in broken(history)


def test_a_finished_run_without_a_checkpoint_of_its_last_step_is_found() -> None:
    config = run_config(checkpoint=CheckpointConfig(interval=2))
    history = History(config)
    history.open()
    history.sync()
    for step in range(1, config.steps + 1):
        history.step()
        if step % 2 == 0 or step == config.steps:
            history.checkpoint()
    history.end()
    assert broken(history) == set()
    assert broken(whole_run(config)) == {"I12"}


def test_a_step_behind_a_checkpoint_that_was_due_and_not_made_is_found() -> None:
    config = run_config(checkpoint=CheckpointConfig(interval=2))
    history = History(config)
    history.open()
    history.sync()
    history.step()
    history.step()
    history.step()
    assert broken(killed(history)) == {"I12"}


def test_a_checkpoint_counted_on_but_not_written_is_found() -> None:
    history = started()
    history.step()
    history.checkpoint()
    history.change(Checkpointed, digest="other")
    assert broken(killed(history)) == {"I12"}


def test_a_checkpoint_of_weights_the_trainer_never_had_is_found() -> None:
    history = started()
    history.step()
    history.checkpoint()
    history.change(CheckpointWritten, digest="other")
    history.change(Checkpointed, digest="other")
    assert broken(killed(history)) == {"I12"}


def test_latest_that_does_not_verify_is_found() -> None:
    history = started()
    history.step()
    history.checkpoint()
    history.change(CheckpointLatest, verifies=False)
    assert broken(killed(history)) == {"I12"}
