"""FLOPs of a model, against what torch counts, and the speed of devices."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offbeat.config.loss_spec import LossSpec
from offbeat.plugins.megatron.architecture import architecture_flops, read_architecture
from offbeat.trainers.batches.packing import flatten, pack, pack_rows, visible_in
from offbeat.trainers.batches.planner import plan_rows
from offbeat.trainers.flops import PassTimer, known_peak, tokens_and_pairs
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.step_sums import PassWork, RankSums, StepSums, StepTotals
from offbeat.trainers.torch.flops import model_flops
from tests.support.chunks import in_chunk
from tests.support.random_groups import make_group
from tests.support.split_steps import MakeTrainer, Step

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=8, mlp_only_layers=[1]))


def qwen2_moe() -> PreTrainedModel:
    config = Qwen2MoeConfig(**SMALL, num_experts=4, shared_expert_intermediate_size=40)
    return Qwen2MoeForCausalLM(config)


def glm4_moe() -> PreTrainedModel:
    config = Glm4MoeConfig(**SMALL, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1)
    return Glm4MoeForCausalLM(config)


def deepseek_v3() -> PreTrainedModel:
    sizes: dict[str, Any] = SMALL | {"num_key_value_heads": 4}
    del sizes["head_dim"]
    config = DeepseekV3Config(
        **sizes,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    return DeepseekV3ForCausalLM(config)


EXPERTS = (qwen3_moe, qwen2_moe, glm4_moe, deepseek_v3)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_a_third_of_the_flops_is_what_torch_counts_forward(
    request: pytest.FixtureRequest, architecture: str
) -> None:
    path: Path = request.getfixturevalue(architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    assert third_of_counted(model) == forward_flops(model)


@pytest.mark.parametrize("make", EXPERTS, ids=lambda each: each.__name__)
def test_of_experts_those_are_counted_that_a_token_is_sent_to(
    make: Callable[[], PreTrainedModel],
) -> None:
    model = make().eval()
    assert third_of_counted(model) == forward_flops(model)


@pytest.mark.parametrize("make", EXPERTS[:3], ids=lambda each: each.__name__)
def test_the_sizes_of_an_architecture_give_the_flops_of_its_modules(
    tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    assert architecture_flops(read_architecture(tmp_path)) == model_flops(model)


def test_the_flops_of_an_architecture_are_those_counted_by_hand(qwen3: Path) -> None:
    hidden, heads, groups, size, wide, layers, words = 64, 4, 2, 16, 96, 2, 64
    attention = hidden * size * heads + 2 * hidden * size * groups + size * heads * hidden
    counted = architecture_flops(read_architecture(qwen3))
    assert counted is not None
    assert counted.token == 6 * layers * (attention + 3 * hidden * wide)
    assert counted.place == 6 * words * hidden
    assert counted.pair == 6 * layers * (heads * size + heads * size)


def test_heads_of_layers_of_other_sizes_are_each_counted() -> None:
    sizes: dict[str, Any] = SMALL | {
        "attn_implementation": "eager",
        "hidden_size_per_layer_input": 0,
    }
    for unknown in ("experts_implementation", "moe_intermediate_size", "num_experts_per_tok"):
        del sizes[unknown]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes |= {"global_head_dim": 24, "layer_types": kinds, "pad_token_id": 0}
    config = Gemma4TextConfig(**sizes)
    model = Gemma4ForCausalLM(config).eval()
    flops = model_flops(model)
    assert flops is not None
    assert flops.pair == 6 * 4 * (2 * 16 + 2 * 16 + 2 * 24)
    assert third_of_counted(model) == forward_flops(model)


ROWS, TOKENS = 3, 20


def forward_flops(model: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((ROWS, TOKENS), dtype=torch.int64), use_cache=False)
    by_module = counter.get_flop_counts()
    # Angles of positions are a matrix product in transformers 5.17, and a product of numbers later.
    angles = [counts for name, counts in by_module.items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(sum(counts.values()) for counts in angles)


def third_of_counted(model: Any) -> float:
    flops = model_flops(model)
    assert flops is not None
    pairs = ROWS * TOKENS**2  # eager attention computes those too that do not attend
    return (ROWS * TOKENS * (flops.token + flops.place) + pairs * flops.pair) / 3


@pytest.mark.parametrize("flat", [True, False])
def test_tokens_and_pairs_are_those_of_the_mask(*, flat: bool) -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, 5, [4, 1, 7]), make_group(rng, 3, [2])]
    batch = flatten(groups, only_trained=False, vocabulary=64)
    packed = pack(batch, plan_rows(batch, response_tokens=1e9, max_tokens=99), flat=flat)
    real_RT = packed.segments_RT >= 0
    pairs = int(visible_in(packed)[real_RT].sum())
    assert tokens_and_pairs(packed) == (int(real_RT.sum()), pairs)
    assert tokens_and_pairs(pack_rows([[1, 2, 3]])) == (3, 6)


def test_experts_of_a_router_that_is_not_known_are_not_counted() -> None:
    sizes: dict[str, Any] = SMALL | {"num_local_experts": 4}
    for unknown in ("experts_implementation", "moe_intermediate_size"):
        del sizes[unknown]
    assert model_flops(GptOssForCausalLM(GptOssConfig(**sizes))) is None


def test_a_frozen_matrix_has_no_gradient(trainer_of: MakeTrainer) -> None:
    model = trainer_of().module
    trained = model_flops(model)
    frozen = model_flops(model.requires_grad_(requires_grad=False))
    assert trained is not None
    assert frozen is not None
    assert frozen.token == trained.token * 4 / 6


def test_a_step_reports_the_speed_of_a_device(trainer_of: MakeTrainer, step_data: Step) -> None:
    speed = trainer_of().train(*in_chunk(step_data), LossSpec()).speed
    assert speed["throughput/device_flop_per_s"] > speed["throughput/device_tokens_per_s"] > 0
    assert "throughput/mfu" not in speed
    assert known_peak(torch.device("cpu"), torch.float32) is None


def passes(tokens: int, flops: float, seconds: float, replica: int) -> RankSums:
    work = PassWork(tokens, flops, seconds, replica)
    return RankSums(tokens, 1, 0.0, {}, (), work=work)


def test_utilisation_is_that_of_all_devices_over_the_known_peak() -> None:
    ranks = [passes(10, 600.0, 2.0, replica=0), passes(20, 900.0, 3.0, replica=1)]
    totals = StepTotals(LossSpec().config, ranks)
    assert totals.speed(1000.0) == {
        "throughput/device_tokens_per_s": 6.0,
        "throughput/device_flop_per_s": 300.0,
        "throughput/mfu": 0.3,
    }
    assert "throughput/mfu" not in totals.speed(None)


def test_devices_of_a_replica_are_busy_until_its_last_is_done_and_its_tokens_count_once() -> None:
    class Gathering(SingleRank):
        """Of two ranks of one replica the second, which does not contribute."""

        def all_gather(self, value: Any, decoder: object) -> list[Any]:
            del decoder
            return [passes(12, 600.0, 1.5, replica=3), value]

    sums = StepSums(LossSpec(), replica=3)
    sums.add_work(8, 400.0, lambda: 1.0)
    sums.add_work(4, 200.0, lambda: 2.0)
    totals = sums.totals(Gathering(), contributes=False)
    assert totals.tokens == 12
    assert totals.speed(None) == {
        "throughput/device_tokens_per_s": 12 / 6.0,
        "throughput/device_flop_per_s": 600 / 6.0,
    }


def test_the_time_of_passes_is_what_passed_between_start_and_stop() -> None:
    before = time.perf_counter()
    timer = PassTimer(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(1000):
        pass
    ended = time.perf_counter()
    timer.stop()
    assert ended - began <= timer.seconds() <= time.perf_counter() - before
    assert timer.seconds() == timer.seconds()
