"""Every loss through the split step: what one call does, any cut into chunks does."""

from typing import Any

import numpy as np
import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import (
    CispoLossConfig,
    ClippedPgLossConfig,
    GspoLossConfig,
    SapoLossConfig,
    SftLossConfig,
)
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.split_steps import MakeTrainer, Step, run_step

LOSSES = {
    "gspo": LossSpec(GspoLossConfig(clip_low=0.5, clip_high=0.5, normalize="sequences")),
    "cispo": LossSpec(CispoLossConfig(clip_low=1.0, clip_high=4.0, entropy_coef=0.1)),
    "sft": LossSpec(SftLossConfig()),
    "dual_clip": LossSpec(ClippedPgLossConfig(dual_clip=1.5)),
    "icepop": LossSpec(
        ClippedPgLossConfig(
            old_logprobs="policy", icepop_band=(0.7, 1.4), kl_coef=0.1, kl_kind="k2"
        )
    ),
    "mis": LossSpec(
        ClippedPgLossConfig(old_logprobs="policy", sequence_band=(0.9, 1.1), normalize="sequences")
    ),
    "current": LossSpec(ClippedPgLossConfig(old_logprobs="current", tis_cap=1.5)),
    "dr_grpo": LossSpec(ClippedPgLossConfig(normalize="constant", constant_tokens=12)),
    "sapo": LossSpec(SapoLossConfig(off_policy_delta=0.01, kl_coef=0.1, kl_gradient="unbiased")),
    "sequence_cap": LossSpec(
        ClippedPgLossConfig(old_logprobs="current", sequence_cap=1.05, kl_reward_coef=0.1)
    ),
    "step_std": LossSpec(ClippedPgLossConfig(step_std=True)),
    "kept": LossSpec(
        ClippedPgLossConfig(old_logprobs="policy", icepop_band=(0.7, 1.4), count_dropped=False)
    ),
}


def aged(step: Step, versions: int) -> Step:
    """The same groups, their tokens drawn from this many weight versions, the oldest first."""
    groups = [dict(group) for group in step[0]]
    for group in groups:
        tokens = len(group["response_ids"])
        group["weight_versions"] = np.sort(np.arange(tokens) % versions).astype(np.int32)
    return groups, step[1]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_split_step_is_the_single_call(
    trainer_of: MakeTrainer, step_data: Step, loss: LossSpec
) -> None:
    want = trainer_of().train(*in_chunk(step_data), loss)
    assert want.applied
    for chunks in (2, 8):
        trainer = trainer_of(max_tokens_per_microbatch=60, shared_prompt=chunks == 2)
        got = run_step(trainer, step_data, loss, chunks)
        assert got.loss == pytest.approx(want.loss, rel=1e-10)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-10)
        assert got.metrics == pytest.approx(want.metrics, rel=1e-6)


def test_logprobs_of_the_pass_are_those_of_a_pass_before_the_step(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    def loss(**changes: Any) -> LossSpec:
        return LossSpec(ClippedPgLossConfig(icepop_band=(0.01, 3.0), tis_cap=1.1, **changes))

    groups, advantages = step_data
    trainer = trainer_of()
    columns = trainer.prepare_logprobs(
        build_chunk(groups), policy=True, reference=False, temperature=1.0
    )
    recomputed = [{**group, **own} for group, own in zip(groups, columns, strict=True)]
    want = trainer.train(build_chunk(recomputed), advantages, loss(old_logprobs="policy"))
    got = trainer_of().train(build_chunk(groups), advantages, loss(old_logprobs="current"))
    assert got.metrics["train/tis_weight_mean"] > 0
    assert got.metrics == pytest.approx(want.metrics, rel=1e-5)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)  # columns are float32
    assert got.metrics["train/ratio_min"] == got.metrics["train/ratio_max"] == 1


def test_metrics_say_how_old_the_tokens_were(trainer_of: MakeTrainer, step_data: Step) -> None:
    trainer = trainer_of()
    first = trainer.train(*in_chunk(step_data), LossSpec())
    assert first.metrics["staleness/token_fraction_at_0"] == 1
    second = trainer.train(*in_chunk(aged(step_data, 2)), LossSpec())
    labels = {name.partition("_at_")[2] for name in second.metrics if "_at_" in name}
    assert labels == {"0", "1"}
    shares = (second.metrics[f"staleness/token_fraction_at_{each}"] for each in ("0", "1"))
    assert sum(shares) == pytest.approx(1)
