"""A step of megatron-core on one rank of the device against a plain loop in float64 on the CPU."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.messages.fences import StepKey
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.gpu import plain
from tests.gpu.conftest import Measured

pytest.importorskip("megatron.core", reason="the extra megatron is not installed")

VOCABULARY: Final = 512
BOUND: Final = 2e-4
LOSS: Final = LossSpec(
    ClippedPgLossConfig(old_logprobs="policy", clip_low=plain.CLIP, clip_high=plain.CLIP)
)
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


@pytest.fixture
def stand_in(device: str) -> Iterator[None]:
    """Let the CPU stand in for CUDA in a rehearsal; leave no process group behind."""
    from megatron.core import parallel_state  # noqa: PLC0415 -- an extra

    from offbeat.plugins.megatron.cpu_shim import cpu_stands_in  # noqa: PLC0415

    with cpu_stands_in("cpu") if device == "cpu" else nullcontext():
        yield
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_step_of_megatron_updates_as_a_plain_loop_in_float64(
    tmp_path: Path, device: str, kind: str, measured: Measured
) -> None:
    from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer  # noqa: PLC0415 -- an extra

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES) if kind == "dense" else Qwen3MoeConfig(**SIZES, **EXPERTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    trainer = MegatronTrainer(
        tmp_path,
        trainer=MegatronTrainerConfig(
            device=device, optimizer=OptimizerConfig.model_validate(plain.OPTIMIZER)
        ),
        model=ModelConfig(path=str(tmp_path), dtype="float32"),
        total_steps=10,
        peers=SingleRank(),
    )
    step, key = plain.make_step(VOCABULARY), StepKey(1, 1, 0)
    trainer.begin_train_step(key, LOSS)
    for half in (slice(0, 1), slice(1, None)):
        key = key.next()
        chunk = build_chunk(step.groups[half])
        trainer.train_microbatch(key, chunk, step.advantages[half])
    assert trainer.finish_train_step(key.next()).applied
    model = plain.load_in_float64(tmp_path)
    before = plain.read_saved_weights(model, tmp_path / "before")
    plain.train_step(model, step)
    after = plain.read_saved_weights(model, tmp_path / "after")
    error = plain.worst_update_error(dict(trainer.iterate_weights()), after, before)
    measured("error of a step of megatron-core, relative to the largest update", error, "", kind)
    assert error < BOUND
