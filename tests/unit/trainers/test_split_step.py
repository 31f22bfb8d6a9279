from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import (
    ClippedPgLossConfig,
)
from offbeat.messages.failures import SchemaError, StepAlreadyOpen, StepOutOfOrder
from offbeat.messages.fences import StepKey
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.default_dtype import sixteen_bit_default
from tests.support.plain_passes import plain_logprobs_of_group
from tests.support.split_steps import (
    MakeTrainer,
    Step,
    naive_gradients,
    raw_gradients,
    run_step,
    worst_relative_error,
)

FULL = LossSpec(
    ClippedPgLossConfig(
        old_logprobs="policy", tis_cap=2.0, kl_coef=0.1, clip_low=0.4, clip_high=0.6
    )
)
BY_SEQUENCES = LossSpec(ClippedPgLossConfig(normalize="sequences"), temperature=0.7)


def weights(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in trainer.iterate_weights()}


@pytest.mark.parametrize("loss", [FULL, BY_SEQUENCES], ids=["tokens", "sequences"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("shared_prompt", [True, False])
def test_the_gradient_is_that_of_one_plain_sequence_after_another(
    request: pytest.FixtureRequest,
    trainer_of: MakeTrainer,
    step_data: Step,
    loss: LossSpec,
    architecture: str,
    shared_prompt: bool,
) -> None:
    path: Path = request.getfixturevalue(architecture)
    trainer = trainer_of(path, shared_prompt=shared_prompt, max_tokens_per_microbatch=150)
    want = naive_gradients(trainer, step_data, loss)
    for chunks in (1, 2, 8):
        got = (
            raw_gradients(trainer, step_data, loss, chunks)
            if chunks == 1
            else raw_gradients(
                trainer_of(path, shared_prompt=shared_prompt), step_data, loss, chunks
            )
        )
        assert worst_relative_error(got, want) <= 1e-10


@pytest.mark.parametrize("loss", [FULL, BY_SEQUENCES], ids=["tokens", "sequences"])
@pytest.mark.parametrize("shared_prompt", [True, False])
def test_a_step_in_chunks_moves_the_weights_as_the_single_shot_does(
    trainer_of: MakeTrainer, step_data: Step, loss: LossSpec, shared_prompt: bool
) -> None:
    whole = trainer_of(shared_prompt=shared_prompt)
    want = whole.train(*in_chunk(step_data), loss)
    assert want.applied
    for chunks in (1, 2, 8):
        trainer = trainer_of(shared_prompt=shared_prompt)
        got = run_step(trainer, step_data, loss, chunks)
        assert (got.tokens, got.sequences, got.chunks) == (want.tokens, want.sequences, chunks)
        assert got.loss == pytest.approx(want.loss, rel=1e-10)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-10)
        assert got.metrics == pytest.approx(want.metrics, rel=1e-10)
        assert got.metrics.keys() == want.metrics.keys()
        assert worst_relative_error(weights(trainer), weights(whole)) <= 1e-9


def test_shared_prompts_and_padded_rows_give_the_same_gradient(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    shared = raw_gradients(trainer_of(shared_prompt=True), step_data, FULL, 1)
    padded = raw_gradients(trainer_of(shared_prompt=False), step_data, FULL, 1)
    assert worst_relative_error(shared, padded) <= 1e-10


def test_counts_are_of_valid_tokens_and_of_sequences_that_have_one(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    result = trainer_of().train(*in_chunk(step_data), LossSpec())
    assert result.tokens == sum(int(group["loss_mask"].sum()) for group in step_data[0])
    assert result.sequences == sum(
        bool(group["loss_mask"][start:end].any())
        for group in step_data[0]
        for start, end in zip(
            group["response_offsets"], group["response_offsets"][1:], strict=False
        )
    )


def test_a_step_is_the_same_while_another_thread_makes_a_16_bit_model(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    undisturbed, disturbed = trainer_of(dtype="float32"), trainer_of(dtype="float32")
    want = [run_step(undisturbed, step_data, FULL, 2) for _ in range(2)]
    with sixteen_bit_default():
        got = [run_step(disturbed, step_data, FULL, 2) for _ in range(2)]
    assert [each.metrics for each in got] == [each.metrics for each in want]
    assert all(map(torch.equal, weights(disturbed).values(), weights(undisturbed).values()))


def test_an_aborted_step_leaves_no_trace(trainer_of: MakeTrainer, step_data: Step) -> None:
    groups, advantages = step_data
    undisturbed, disturbed = trainer_of(), trainer_of()
    for trainer in (undisturbed, disturbed):
        run_step(trainer, step_data, LossSpec(), 2)
    rng = torch.get_rng_state()

    disturbed.begin_train_step(StepKey(2, 2, 0), BY_SEQUENCES)
    disturbed.train_microbatch(StepKey(2, 2, 1), build_chunk(groups[:3]), advantages[:3])
    torch.rand(3)
    disturbed.abort_train_step(StepKey(2, 2, 0))
    disturbed.abort_train_step(StepKey(2, 2, 0))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(each.grad is None for each in disturbed.module.parameters())
    assert disturbed.weights_digest() == undisturbed.weights_digest()

    disturbed.begin_train_step(StepKey(2, 3, 0), LossSpec())
    disturbed.train_microbatch(StepKey(2, 3, 1), build_chunk(groups), advantages)
    disturbed.finish_train_step(StepKey(2, 3, 2))
    run_step(undisturbed, step_data, LossSpec(), 1, number=2)
    assert disturbed.weights_digest() == undisturbed.weights_digest()


def test_the_same_inputs_give_the_same_bits(trainer_of: MakeTrainer, step_data: Step) -> None:
    digests = set[str]()
    for _ in range(2):
        trainer = trainer_of(dtype="float32")
        for number in (1, 2, 3):
            run_step(trainer, step_data, FULL, 2, number)
        digests.add(trainer.weights_digest())
    assert len(digests) == 1


def test_only_the_next_call_of_the_open_step_is_served(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer = trainer_of()
    trainer.begin_train_step(StepKey(1, 1, 0), LossSpec())
    with pytest.raises(StepAlreadyOpen):
        trainer.begin_train_step(StepKey(2, 1, 0), LossSpec())
    with pytest.raises(StepOutOfOrder):
        trainer.train_microbatch(StepKey(1, 1, 2), *in_chunk(step_data))
    with pytest.raises(RuntimeError, match="open"):
        trainer.train(*in_chunk(step_data), LossSpec())


def test_after_a_failed_microbatch_only_an_abort_is_taken(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups, advantages = step_data
    clean, failed = trainer_of(), trainer_of()
    run_step(clean, step_data, LossSpec(), 1)
    failed.begin_train_step(StepKey(1, 1, 0), LossSpec())
    with pytest.raises(SchemaError, match="advantages"):
        failed.train_microbatch(StepKey(1, 1, 1), build_chunk(groups), [*advantages[:-1], (1.0,)])
    with pytest.raises(StepOutOfOrder, match="abort"):
        failed.train_microbatch(StepKey(1, 1, 1), build_chunk(groups), advantages)
    failed.abort_train_step(StepKey(1, 1, 0))
    failed.begin_train_step(StepKey(1, 2, 0), LossSpec())
    failed.train_microbatch(StepKey(1, 2, 1), build_chunk(groups), advantages)
    failed.finish_train_step(StepKey(1, 2, 2))
    assert failed.weights_digest() == clean.weights_digest()


def test_logprobs_can_be_prepared_while_a_step_is_open(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups, advantages = step_data
    disturbed, undisturbed = trainer_of(), trainer_of()
    disturbed.begin_train_step(StepKey(1, 1, 0), LossSpec())
    disturbed.train_microbatch(StepKey(1, 1, 1), build_chunk(groups), advantages)
    disturbed.prepare_logprobs(build_chunk(groups), policy=True, reference=True, temperature=1.0)
    disturbed.finish_train_step(StepKey(1, 1, 2))
    run_step(undisturbed, step_data, LossSpec(), 1)
    assert disturbed.weights_digest() == undisturbed.weights_digest()


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_prepared_logprobs_are_those_of_one_plain_sequence_after_another(
    trainer_of: MakeTrainer, step_data: Step, shared_prompt: bool
) -> None:
    trainer = trainer_of(shared_prompt=shared_prompt, max_tokens_per_microbatch=60)
    columns = trainer.prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=False, temperature=0.5
    )
    for group, prepared in zip(step_data[0], columns, strict=True):
        assert prepared.keys() == {"policy_logprobs"}
        with torch.no_grad():
            want = torch.cat(plain_logprobs_of_group(trainer.module, group, 0.5))
        assert prepared["policy_logprobs"] == pytest.approx(want.numpy(), rel=1e-6)


def test_the_reference_stays_where_training_began(trainer_of: MakeTrainer, step_data: Step) -> None:
    def both(trainer: TorchTrainer) -> tuple[Any, Any]:
        (columns,) = trainer.prepare_logprobs(
            build_chunk(step_data[0][:1]), policy=True, reference=True, temperature=1.0
        )
        return columns["policy_logprobs"], columns["reference_logprobs"]

    trainer = trainer_of(dtype="float32")
    policy, reference = both(trainer)
    assert np.array_equal(policy, reference)
    run_step(trainer, step_data, LossSpec(), 1)
    moved, still = both(trainer)
    assert np.array_equal(still, reference)
    assert not np.array_equal(moved, reference)


def test_a_loss_without_its_columns_is_refused_by_name(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups = [{k: v for k, v in g.items() if k != "policy_logprobs"} for g in step_data[0]]
    with pytest.raises(SchemaError, match="policy_logprobs"):
        trainer_of().train(build_chunk(groups), step_data[1], FULL)


def test_microbatches_keep_to_the_token_budget_and_the_result(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    one, many = trainer_of(), trainer_of(max_tokens_per_microbatch=40)
    for trainer in (one, many):
        trainer.begin_train_step(StepKey(1, 1, 0), LossSpec())
    whole = one.train_microbatch(StepKey(1, 1, 1), *in_chunk(step_data))
    parts = many.train_microbatch(StepKey(1, 1, 1), *in_chunk(step_data))
    assert whole.microbatches == 1
    assert parts.microbatches > 4
    assert (parts.tokens, parts.sequences) == (whole.tokens, whole.sequences)


def test_training_raises_the_probability_of_what_was_rewarded(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    groups = step_data[0][:2]
    advantages = [(1.0, 0.0, 0.0, 0.0)] * 2
    trainer = trainer_of(dtype="float32")

    def first_sample() -> float:
        columns = trainer.prepare_logprobs(
            build_chunk(groups), policy=True, reference=False, temperature=1.0
        )
        return sum(
            float(each["policy_logprobs"][: group["response_offsets"][1]].sum())
            for each, group in zip(columns, groups, strict=True)
        )

    before = first_sample()
    for number in range(1, 6):
        run_step(
            trainer, (groups, advantages), LossSpec(ClippedPgLossConfig(clip_high=100.0)), 1, number
        )
    assert first_sample() > before + 1
