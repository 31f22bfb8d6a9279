"""Several optimizer steps per step: those of a plain loop over minibatches, applied as one."""

import math
from collections.abc import Callable

import pytest
import torch

from offbeat.algorithms.divisors import STD_EPS
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.fences import StepKey
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.split_steps import (
    MakeTrainer,
    Step,
    naive_gradients,
    run_step,
    worst_relative_error,
)

LOSS = ClippedPgLossConfig(old_logprobs="policy", tis_cap=2.0, kl_coef=0.1)
MINIBATCHES = (2, 0, 1, 1, 0, 2, 0, 1)
SEVERAL = LossSpec(LOSS, minibatches=3, epochs=2)
SEVERAL_OVER_DEVIATION = LossSpec(
    ClippedPgLossConfig(old_logprobs="policy", tis_cap=2.0, step_std=True), minibatches=3, epochs=2
)
RATE = 1e-3


def of(step: Step, minibatch: int) -> Step:
    groups, advantages = step
    chosen = [i for i, each in enumerate(MINIBATCHES) if each == minibatch]
    return [groups[i] for i in chosen], [advantages[i] for i in chosen]


def over_deviation(step: Step) -> Step:
    """Divide advantages by their deviation over the batch, in the plain way."""
    groups, advantages = step
    trained = [
        each
        for group, of_group in zip(groups, advantages, strict=True)
        for sample, each in enumerate(of_group)
        if group["loss_mask"][slice(*group["response_offsets"][sample : sample + 2])].any()
    ]
    deviation = math.sqrt(sum(each**2 for each in trained) / len(trained)) + STD_EPS
    return groups, [tuple(each / deviation for each in of_group) for of_group in advantages]


@pytest.mark.parametrize("chunks", [1, 2, 8])
@pytest.mark.parametrize(
    ("several", "scaled"),
    [(SEVERAL, lambda step: step), (SEVERAL_OVER_DEVIATION, over_deviation)],
    ids=["plain", "step_std"],
)
def test_weights_and_norm_are_those_of_a_plain_loop_over_minibatches_and_epochs(
    trainer_of: MakeTrainer,
    step_data: Step,
    several: LossSpec,
    scaled: Callable[[Step], Step],
    chunks: int,
) -> None:
    reference = LossSpec(several.config.model_copy(update={"step_std": False}))
    optimizer = {"learning_rate": RATE}
    plain, trainer = trainer_of(optimizer=optimizer), trainer_of(optimizer=optimizer)
    adamw = torch.optim.AdamW(plain.module.parameters(), lr=RATE, weight_decay=0.0)
    norms = list[float]()
    for _ in range(several.epochs):
        for minibatch in range(several.minibatches):
            gradients = naive_gradients(plain, of(scaled(step_data), minibatch), reference)
            for name, each in plain.module.named_parameters():
                each.grad = gradients[name]
            norm = torch.nn.utils.clip_grad_norm_(plain.module.parameters(), 1.0)
            norms.append(float(norm))
            adamw.step()
            plain.module.zero_grad()

    result = run_step(trainer, step_data, several, chunks, minibatches=MINIBATCHES)

    got, want = (dict(each.iterate_weights()) for each in (trainer, plain))
    assert worst_relative_error(got, want) <= 1e-10
    assert result.grad_norm == pytest.approx(sum(norms) / len(norms), rel=1e-10)
    assert result.metrics["train/optimizer_steps"] == 6
    assert (trainer.steps_applied, result.chunks) == (1, chunks)
    assert trainer.last_applied == StepKey(1, 1, chunks + 1)


def test_tokens_and_sequences_are_those_of_the_step_however_often_it_trains_them(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    once = trainer_of().train(*in_chunk(step_data), LossSpec(LOSS))
    result = trainer_of().train(*in_chunk(step_data), SEVERAL, MINIBATCHES)
    assert (result.tokens, result.sequences) == (once.tokens, once.sequences)


def test_a_minibatch_whose_loss_is_not_finite_is_passed_over_and_the_others_are_trained(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups, advantages = step_data[0], list(step_data[1])
    advantages[MINIBATCHES.index(1)] = (math.nan,) * len(advantages[0])
    other, trainer = trainer_of(), trainer_of()
    kept = [i for i, each in enumerate(MINIBATCHES) if each != 1]
    result = trainer.train(build_chunk(groups), advantages, SEVERAL, MINIBATCHES)
    other.train(
        build_chunk([groups[i] for i in kept]),
        [advantages[i] for i in kept],
        SEVERAL,
        [MINIBATCHES[i] for i in kept],
    )
    assert result.applied
    assert result.metrics["train/optimizer_steps"] == 4
    assert result.metrics["train/minibatches_refused"] == 2
    assert math.isfinite(result.loss)
    assert trainer.weights_digest() == other.weights_digest()


def test_a_step_of_which_no_minibatch_can_be_applied_is_not_applied(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups, advantages = step_data[0], [(math.nan,) * len(each) for each in step_data[1]]
    trainer = trainer_of()
    before = trainer.weights_digest()
    result = trainer.train(build_chunk(groups), advantages, SEVERAL, MINIBATCHES)
    assert (result.applied, result.reason) == (False, "loss is nan")
    assert (trainer.steps_applied, trainer.weights_digest()) == (0, before)


def test_an_abort_before_finish_leaves_no_trace_of_held_groups(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    clean, disturbed = trainer_of(), trainer_of()
    disturbed.begin_train_step(StepKey(1, 1, 0), SEVERAL)
    disturbed.train_microbatch(StepKey(1, 1, 1), *in_chunk(step_data), MINIBATCHES)
    disturbed.abort_train_step(StepKey(1, 1, 0))
    for number, trainer in ((2, disturbed), (1, clean)):
        key = StepKey(1, number, 0)
        trainer.begin_train_step(key, SEVERAL)
        trainer.train_microbatch(key.next(), *in_chunk(step_data), MINIBATCHES)
        trainer.finish_train_step(key.next().next())
    assert disturbed.weights_digest() == clean.weights_digest()
