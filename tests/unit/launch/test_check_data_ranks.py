"""``offbeat check`` says how much the largest rank of a sharded model holds."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from offbeat.config.run import RunConfig
from offbeat.launch.checks.torch_ranks import check_data_ranks
from offbeat.messages.finding import Finding, Level, size

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def findings(
    path: Path, model: PreTrainedConfig, gpu: int | None = None, **trainer: Any
) -> list[Finding]:
    model.save_pretrained(path)
    recipe = {"steps": 1, "model": {"path": str(path)}, "trainer": trainer}
    return list(check_data_ranks(RunConfig.model_validate(recipe), gpu))


def test_data_parallel_ranks_hold_a_half_each_and_need_no_plan(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, GPT2Config(n_layer=1, tie_word_embeddings=True), data_parallel=2)
    # Embeddings of tokens and places; a layer of attention, MLP and norms, with biases; a norm.
    weights = (50257 + 1) // 2 * 768 + 512 * 768
    weights += 384 * (3 * 768 + 768 + 4 * 768) + 4 * 384 * 768  # rows are divided
    weights += (3 * 768 + 768 + 4 * 768 + 768 + 6 * 768) // 2
    assert found.level is Level.OK
    assert found.subject == "trainer ranks"
    assert found.message.startswith("2 ranks; the largest holds ")
    assert f"gradients {size(4 * weights)}, optimizer {size(8 * weights)}" in found.message


@pytest.mark.plugins
def test_the_whole_model_that_rank_0_loads_first_is_counted(tmp_path: Path) -> None:
    model = LlamaConfig(**SIZES, tie_word_embeddings=False)
    on_gpu = {"data_parallel": 16, "device": "cuda", "gpus": 1}
    whole = 4 * (2 * (48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 80) + 2 * 64 * 48 + 5 * 48) + 64
    (found,) = findings(tmp_path, model, whole, **on_gpu)
    assert found.level is Level.ERROR
    assert "while it starts, rank 0 holds the whole model plus its own part" in found.message
    assert found.fix.startswith("Set trainer.backend=megatron")
    (found,) = findings(tmp_path, model, 2 * whole, **on_gpu)
    assert found.level is Level.OK


def test_nothing_is_said_of_one_rank(tmp_path: Path) -> None:
    assert findings(tmp_path, LlamaConfig(**SIZES)) == []
