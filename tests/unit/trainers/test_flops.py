"""FLOPs of a model, against what torch counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_groups import make_group
from split_steps import MakeTrainer, Step
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbeat.config.loss_spec import LossSpec
from offbeat.trainers.batches.packing import flatten, pack, rows_of, visible_in
from offbeat.trainers.batches.rows import plan_rows
from offbeat.trainers.step_sums import RankSums, StepTotals
from offbeat.trainers.torch.flops import known_peak, model_flops, tokens_and_pairs


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_a_third_of_the_flops_is_what_torch_counts_forward(
    request: pytest.FixtureRequest, architecture: str
) -> None:
    path: Path = request.getfixturevalue(architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    rows, tokens = 3, 20
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((rows, tokens), dtype=torch.int64), use_cache=False)
    flops = model_flops(model)
    assert flops is not None
    pairs = rows * tokens**2  # eager attention computes those too that do not attend
    counted = rows * tokens * (flops.token + flops.place) + pairs * flops.pair
    assert counter.get_total_flops() == counted / 3


@pytest.mark.parametrize("flat", [True, False])
def test_tokens_and_pairs_are_those_of_the_mask(*, flat: bool) -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, 5, [4, 1, 7]), make_group(rng, 3, [2])]
    batch = flatten(groups, only_trained=False, vocabulary=64)
    packed = pack(batch, plan_rows(batch, response_tokens=1e9, max_tokens=99), flat=flat)
    real_RT = packed.segments_RT >= 0
    pairs = int(visible_in(packed)[real_RT].sum())
    assert tokens_and_pairs(packed) == (int(real_RT.sum()), pairs)
    assert tokens_and_pairs(rows_of([[1, 2, 3]])) == (3, 6)


def test_a_model_with_experts_has_no_count_and_a_frozen_matrix_no_gradient(
    trainer_of: MakeTrainer,
) -> None:
    experts = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_experts=4
    )
    assert model_flops(Qwen3MoeForCausalLM(experts)) is None
    model = trainer_of().module
    trained = model_flops(model)
    frozen = model_flops(model.requires_grad_(requires_grad=False))
    assert trained is not None
    assert frozen is not None
    assert frozen.token == trained.token * 4 / 6


def test_a_step_reports_the_speed_of_a_device(trainer_of: MakeTrainer, step_data: Step) -> None:
    speed = trainer_of().train(*step_data, LossSpec()).speed
    assert speed["throughput/device_flop_per_s"] > speed["throughput/device_tokens_per_s"] > 0
    assert "throughput/mfu" not in speed
    assert known_peak(torch.device("cpu"), torch.float32) is None


def test_utilisation_is_that_of_all_devices_over_the_known_peak() -> None:
    def rank(*work: float) -> RankSums:
        tokens, flops, seconds = work
        return RankSums(1, 1, 0.0, {}, (), work=(int(tokens), flops, seconds))

    totals = StepTotals(LossSpec().config, [rank(10, 600.0, 2.0), rank(20, 900.0, 3.0)])
    assert totals.speed(1000.0) == {
        "throughput/device_tokens_per_s": 6.0,
        "throughput/device_flop_per_s": 300.0,
        "throughput/mfu": 0.3,
    }
    assert "throughput/mfu" not in totals.speed(None)
