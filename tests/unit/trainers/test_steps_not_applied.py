"""Steps that must not move the weights: they leave them, and the next step, as if they had not been."""

import math

import numpy as np
import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.split_steps import MakeTrainer, Step, run_step


def test_a_step_without_a_valid_token_is_not_applied(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups = [dict(group, loss_mask=np.zeros_like(group["loss_mask"])) for group in step_data[0]]
    trainer = trainer_of(optimizer={"weight_decay": 0.1})
    before = trainer.weights_digest()
    result = run_step(trainer, (groups, step_data[1]), LossSpec(), 2)
    assert (result.applied, result.reason, result.tokens) == (False, "no valid tokens", 0)
    assert trainer.weights_digest() == before
    assert trainer.steps_applied == 0


def test_a_step_that_a_band_dropped_wholly_is_not_applied_and_says_so(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    loss = LossSpec(
        ClippedPgLossConfig(old_logprobs="current", icepop_band=(1e6, 1e7), count_dropped=False)
    )
    trainer = trainer_of(optimizer={"weight_decay": 0.1})
    before = trainer.weights_digest()
    result = run_step(trainer, step_data, loss, 2)
    assert (result.applied, result.reason) == (False, "a band dropped every valid token")
    assert result.metrics["train/icepop_masked_fraction"] == 1
    assert (result.tokens > 0, result.loss, trainer.steps_applied) == (True, 0, 0)
    assert trainer.weights_digest() == before


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_or_gradient_that_is_not_finite_is_not_applied(
    trainer_of: MakeTrainer, step_data: Step, poison: float
) -> None:
    groups, advantages = step_data
    clean, poisoned = trainer_of(), trainer_of()
    for trainer in (clean, poisoned):
        run_step(trainer, step_data, LossSpec(), 1)
    bad = [(poison, *advantages[0][1:]), *advantages[1:]]
    result = run_step(poisoned, (groups, bad), LossSpec(), 2, number=2)
    assert not result.applied
    assert result.reason
    assert poisoned.weights_digest() == clean.weights_digest()
    for trainer, number in ((clean, 2), (poisoned, 3)):
        run_step(trainer, step_data, LossSpec(), 1, number)
    assert poisoned.weights_digest() == clean.weights_digest()


def test_a_gradient_that_overflows_under_a_finite_loss_is_not_applied(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer = trainer_of(dtype="float32")
    before = trainer.weights_digest()
    groups, advantages = step_data
    huge = [tuple(4e36 * each for each in group) for group in advantages]
    result = run_step(
        trainer, (groups, huge), LossSpec(ClippedPgLossConfig(clip_low=1.0, clip_high=9.0)), 1
    )
    assert math.isfinite(result.loss)
    assert not result.applied
    assert result.reason in ("gradient norm is inf", "gradient norm is nan")
    assert trainer.weights_digest() == before


def test_an_infinite_loss_under_a_finite_gradient_is_not_applied(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer, groups = trainer_of(dtype="float32"), step_data[0]
    columns = trainer.prepare_logprobs(
        build_chunk(groups), policy=True, reference=False, temperature=1.0
    )
    clipped = [
        dict(group, generation_logprobs=prepared["policy_logprobs"] - np.float32(0.4))
        for group, prepared in zip(groups, columns, strict=True)
    ]
    before = trainer.weights_digest()
    result = run_step(trainer, (clipped, [(2e38,) * 4] * len(groups)), LossSpec(), 1)
    assert (result.applied, result.reason) == (False, "loss is -inf")
    assert trainer.weights_digest() == before
    assert trainer.steps_applied == 0
