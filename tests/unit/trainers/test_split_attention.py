"""Flat rows: attention segment by segment, against the mask that says who sees whom."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_split_step import FULL, naive_gradients, raw_gradients, worst_relative_error
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import CohereConfig, CohereForCausalLM, MistralConfig, MistralForCausalLM

from offbeat.config.loss_spec import LossSpec
from offbeat.trainers.batches.packing import PackedRows, flatten, list_tree_parts, pack, visible_in
from offbeat.trainers.batches.planner import plan_flat_microbatches, plan_rows
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.forward import chunk_head, has_plain_head
from offbeat.trainers.torch.logprobs import token_logprobs_and_entropies
from offbeat.trainers.torch.proof import prove_kind
from offbeat.trainers.torch.split_attention import SPLIT, attention_by_part, split_attention
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.random_groups import make_group
from tests.support.split_steps import MakeTrainer, Step

SHAPES = [(5, [4, 1, 7]), (1, [3]), (6, [1, 1]), (2, [9, 9, 2])]


def flat_row() -> PackedRows:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, prompt, responses) for prompt, responses in SHAPES]
    batch = flatten(groups, only_trained=False, vocabulary=64)
    (rows,) = plan_flat_microbatches(
        plan_rows(batch, response_tokens=1e9, max_tokens=100), max_tokens=100
    )
    return pack(batch, rows, flat=True)


def splits(trainer: TorchTrainer) -> TorchTrainer:
    """The trainer, with calls of attention that cost nothing: it lays all rows end to end."""
    planner = trainer.own_passes.planner
    trainer.own_passes.planner = replace(planner, call_pairs=0.0, ratio_tokens=0.0)
    _, microbatches = trainer.passes.cut([group()], only_trained=True)
    assert all(each.trees for each in microbatches)
    return trainer


def group() -> dict[str, Any]:
    return make_group(np.random.default_rng(3), 5, [6, 4, 2])


@pytest.mark.parametrize("attend", [split_attention, attention_by_part])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_attention_by_segments_and_its_gradient_are_those_of_the_dense_mask(
    attend: Callable[..., Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    packed = flat_row()
    tokens = packed.input_ids_RT.shape[1]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, dtype=dtype) for heads in (4, 2, 2))
    grad = torch.randn(1, 4, tokens, 8, dtype=dtype)
    inputs = [each.requires_grad_() for each in (q, k, v)]
    seen = torch.from_numpy(visible_in(packed))[:, None]
    want = scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=seen, scale=0.3
    )
    want_grads = torch.autograd.grad(want, inputs, grad)
    got = attend(q, k, v, list_tree_parts(packed.trees), 0.3)
    got_grads = torch.autograd.grad(got, inputs, grad)
    for own, other in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert float((own - other).detach().abs().max()) <= tolerance


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("shared_prompt", [True, False])
def test_the_gradient_of_flat_rows_is_that_of_one_plain_sequence_after_another(
    request: pytest.FixtureRequest,
    trainer_of: MakeTrainer,
    step_data: Step,
    architecture: str,
    shared_prompt: bool,
) -> None:
    path: Path = request.getfixturevalue(architecture)

    def make() -> TorchTrainer:
        return splits(trainer_of(path, shared_prompt=shared_prompt, max_tokens_per_microbatch=90))

    want = naive_gradients(make(), step_data, FULL)
    for chunks in (1, 2, 8):
        trainer = make()
        got = raw_gradients(trainer, step_data, FULL, chunks)
        assert worst_relative_error(got, want) <= 1e-10


def test_recomputed_layers_give_the_gradient_of_flat_rows(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    want = raw_gradients(splits(trainer_of()), step_data, FULL, 1)
    recomputed = splits(trainer_of(activation_checkpointing=True))
    got = raw_gradients(recomputed, step_data, FULL, 1)
    assert worst_relative_error(got, want) <= 1e-12


def test_a_teacher_without_split_attention_reads_flat_rows_through_a_mask(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer, loss = splits(trainer_of()), LossSpec()
    want = trainer.prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=False, temperature=loss.temperature
    )
    trainer.module.set_attn_implementation("eager")
    got = trainer.prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=False, temperature=loss.temperature
    )
    for own, other in zip(got, want, strict=True):
        np.testing.assert_allclose(own["policy_logprobs"], other["policy_logprobs"], atol=1e-6)


def test_a_model_with_a_window_shorter_than_the_run_is_not_split() -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=32,
    )
    assert prove_kind(MistralForCausalLM, config, 512, shared_prompt=True).attention != SPLIT


def test_places_in_chunks_have_the_values_and_gradients_of_all_at_once() -> None:
    packed = flat_row()
    torch.manual_seed(0)
    head, tokens = nn.Linear(8, 64, bias=False, dtype=torch.float64), packed.input_ids_RT.shape[1]
    hidden = torch.randn(1, tokens, 8, dtype=torch.float64, requires_grad=True)
    which, target = torch.from_numpy(packed.which_N), torch.from_numpy(packed.target_N)

    def compute(logits: Tensor, which: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropies(logits, which, target, 0.7)

    def found(values: tuple[Tensor, ...]) -> list[Tensor]:
        logprobs, entropies = values
        loss = (logprobs * torch.arange(len(which))).sum() + 0.3 * entropies.square().sum()
        gradients = torch.autograd.grad(loss, [hidden, head.weight])
        return [logprobs, entropies, *gradients]

    places = torch.from_numpy(packed.predicts_U)
    want = found(compute(head(hidden[0][places]), which, target))
    for size in (1, 5, 1000):
        with chunk_head(head, packed, compute, size) as unpack:
            got = found(unpack(head(hidden)))
        for own, other in zip(got, want, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_a_head_whose_output_is_scaled_is_not_plain(trainer_of: MakeTrainer) -> None:
    config = CohereConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        logit_scale=0.25,
    )
    assert not has_plain_head(CohereForCausalLM(config))
    assert has_plain_head(trainer_of().module)
