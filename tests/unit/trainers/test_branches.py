"""Branches of samples in a step: the loss and its gradient against a plain loop in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.algorithms.divisors import STD_EPS
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.generator import StubConfig
from offbeat.config.sections.loss import ClippedPgLossConfig, GspoLossConfig
from offbeat.fakes.trainer import StubTrainer
from offbeat.messages.fences import StepKey
from offbeat.trainers.errors import UnfitColumns
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.plain_passes import plain_logprobs
from tests.support.random_groups import Group
from tests.support.split_steps import MakeTrainer, Step

Config = ClippedPgLossConfig | GspoLossConfig
WIDE: dict[str, Any] = {"clip_low": 0.9, "clip_high": 9.0}
CONFIGS: dict[str, Config] = {
    "tokens": ClippedPgLossConfig(**WIDE),
    "sequences": ClippedPgLossConfig(normalize="sequences", **WIDE),
    "constant": ClippedPgLossConfig(normalize="constant", constant_tokens=9, **WIDE),
    "step deviation": ClippedPgLossConfig(normalize="sequences", step_std=True, **WIDE),
    "a ratio per branch": GspoLossConfig(normalize="sequences", **WIDE),
}
BRANCHES = ([0, 0, 1, 2], [0, 1, 1, 1], [0, 1, 2, 3])
"""The samples that the four rows of a group belong to."""


@pytest.fixture
def branched(step_data: Step) -> Step:
    """The groups of a step, whose rows are branches of fewer samples, with their advantages."""
    rng = np.random.default_rng(1)
    groups, advantages = list[Group](), list[tuple[float, ...]]()
    for place, group in enumerate(step_data[0][:4]):
        samples = BRANCHES[place % len(BRANCHES)]
        groups.append({**group, "branch_samples": np.array(samples, np.int32)})
        advantages.append(tuple(rng.normal(size=samples[-1] + 1).tolist()))
    return groups, advantages


def plain_sums(model: Any, step: Step, config: Config) -> tuple[Tensor, float]:
    """The summed loss and its divisor, one sample after another, of which one branch after another."""
    total, tokens, squares = torch.zeros((), dtype=torch.float64), 0, list[float]()
    for group, advantages in zip(*step, strict=True):
        offsets, branch_samples = group["response_offsets"], group["branch_samples"]
        for sample, advantage in enumerate(advantages):
            terms = list[Tensor]()
            for row in np.flatnonzero(branch_samples == sample):
                own = slice(offsets[row], offsets[row + 1])
                mask = torch.tensor(group["loss_mask"][own])
                new = plain_logprobs(model, group["prompt_ids"], group["response_ids"][own])
                old = torch.tensor(group["generation_logprobs"][own], dtype=torch.float64)
                log_ratio = (new - old)[mask]
                if isinstance(config, GspoLossConfig) and len(log_ratio):
                    log_ratio = log_ratio.mean().expand(len(log_ratio))
                ratio = log_ratio.exp()
                bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
                terms += list(-torch.minimum(ratio * advantage, bounded * advantage))
            if terms:
                part = torch.stack(terms)
                total = total + (part.mean() if config.normalize == "sequences" else part.sum())
                tokens += len(terms)
                squares.append(advantage**2)
    units = {"tokens": tokens, "sequences": len(squares), "constant": 9 * len(squares)}
    divisor = float(units[config.normalize])
    if config.step_std:
        divisor *= math.sqrt(sum(squares) / len(squares)) + STD_EPS
    return total, divisor


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def accumulated(trainer: TorchTrainer, step: Step, loss: LossSpec) -> dict[str, Tensor]:
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, loss)
    for group, advantages in zip(*step, strict=True):
        key = key.next()
        trainer.train_microbatch(key, build_chunk([group]), [advantages])
    found = gradients(trainer.module)
    trainer.abort_train_step(key)
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("max_tokens", [20, 200])
def test_a_sample_with_branches_counts_as_one_sequence_however_its_branches_are_packed(
    trainer_of: MakeTrainer, branched: Step, config: Config, max_tokens: int
) -> None:
    trainer = trainer_of(max_tokens_per_microbatch=max_tokens, shared_prompt=max_tokens > 20)
    total, divisor = plain_sums(trainer.module, branched, config)
    total.backward()
    want = gradients(trainer.module)
    trainer.module.zero_grad()
    got = accumulated(trainer, branched, LossSpec(config))
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-11)
    result = trainer.train(*in_chunk(branched), LossSpec(config))
    assert result.loss == pytest.approx(float(total.detach()) / divisor, rel=1e-9)
    norm = math.sqrt(sum(float(each.square().sum()) for each in want.values()))
    assert result.grad_norm == pytest.approx(norm / divisor, rel=1e-9)


def test_sequences_of_a_step_are_its_samples_with_a_token_to_train(
    trainer_of: MakeTrainer, branched: Step
) -> None:
    first, *others = branched[0]
    mask, offsets = first["loss_mask"].copy(), first["response_offsets"]
    mask[offsets[0] : offsets[2]] = False  # both branches of the first sample
    step = [{**first, "loss_mask": mask}, *others], branched[1]
    samples = sum(map(len, branched[1]))
    torch_result = trainer_of().train(*in_chunk(step), LossSpec())
    stub_result = StubTrainer(StubConfig(step_s=0.0), groups_per_step=8).train(
        *in_chunk(step), LossSpec()
    )
    assert torch_result.sequences == stub_result.sequences == samples - 1
    assert torch_result.tokens == stub_result.tokens


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_sample_whose_branches_are_all_dropped_is_one_dropped_sequence(
    trainer_of: MakeTrainer, branched: Step, advantage: float
) -> None:
    groups = [
        {**each, "generation_logprobs": np.full_like(each["generation_logprobs"], 9)}
        for each in branched[0]
    ]
    advantages = [(advantage,) * len(each) for each in branched[1]]
    config = ClippedPgLossConfig(off_policy_delta=0.1)
    result = trainer_of().train(build_chunk(groups), advantages, LossSpec(config))
    dropped = result.metrics["train/off_policy_masked_fraction"]
    assert dropped == pytest.approx(float(advantage < 0))


@pytest.mark.parametrize("samples", [[0, 1], [1, 1, 2, 2], [0, 2, 2, 3], [0, 1, 0, 1]])
def test_branches_out_of_order_are_the_fault_of_their_group(
    trainer_of: MakeTrainer, branched: Step, samples: list[int]
) -> None:
    groups = [*branched[0]]
    groups[2] = {**groups[2], "branch_samples": np.array(samples, np.int32)}
    with pytest.raises(UnfitColumns) as caught:
        trainer_of().train(build_chunk(groups), branched[1], LossSpec())
    assert (caught.value.place, caught.value.column) == (2, "branch_samples")
