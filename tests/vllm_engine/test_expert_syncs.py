"""A model of experts whose trainer ranks hold some experts each, and an engine that holds all of them."""

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import FP32_NATS
from releases import Weights
from sharded_trainer import EXPERTS, ShardedTrainer, factor
from shared_engine import PROMPT, Engine, Shared, ask, fetch, layout_of, running
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

PYTHON = Path(__file__).parents[2] / ".venv" / "bin" / "python"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts, two of which compute a token; without an end of sequence."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    config = Qwen3MoeConfig(
        **sizes,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        initializer_range=0.2,  # so that it matters which expert computes a token
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["TP1", "TP2"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Shared]:
    yield from running(tmp_path_factory.mktemp("engine"), model, request.param)


@cache
def weights(model: Path, version: int, *, swapped: bool = False) -> Weights:
    """What the trainer holds at a version; ``swapped``: with two experts in each other's place."""
    module = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.mul_(factor(version))
            if swapped and ".0.mlp.experts." in name:
                parameter.copy_(of_the_next_expert(parameter))
    return Weights(module.eval(), None)  # type: ignore[arg-type]  # no release is needed of it


def of_the_next_expert(stacked: Tensor) -> Tensor:
    return stacked.roll(1, 0)


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not PYTHON.exists(), reason="megatron-core is in the environment of `make test`"
)
def test_logprobs_are_those_of_expert_parallel_ranks_after_a_reshard(
    engine: Shared, model: Path
) -> None:
    """Two ranks of megatron-core hold two experts of each layer, and the rest both."""

    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        trainer = ShardedTrainer(model, model.parent, trainer=EXPERTS, python=PYTHON)
        try:
            for version, planned in ((1, None), (2, layout)):
                release = await asyncio.to_thread(trainer.publish, version, planned)
                ack = await fetch(actor, version, version, release)
                assert (ack.version, ack.digest) == (version, release.digest)
                assert all(trainer.sent()), "each rank sends"
                result = await ask(actor, f"exact {version}")
                assert weights(model, version).worst_error(PROMPT, result) < FP32_NATS
                assert {v for spans in result.version_spans for v, _ in spans} == {version}
                wrong = weights(model, version, swapped=True).worst_error(PROMPT, result)
                assert wrong > 100 * FP32_NATS, "an expert in another's place would be seen"
        finally:
            trainer.close()

    engine.play(story)
