import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from offbeat.config.loss_spec import LossSpec
from offbeat.models.loading import generation_config_problem
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk

MakeTrainer = Callable[..., TorchTrainer]
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def test_weights_go_by_their_hugging_face_names_tied_ones_once(
    trainer_of: MakeTrainer, qwen3: Path, llama: Path
) -> None:
    untied = dict(trainer_of(qwen3).iterate_weights())
    tied = dict(trainer_of(llama).iterate_weights())
    assert "lm_head.weight" in untied
    assert "lm_head.weight" not in tied
    assert "model.embed_tokens.weight" in tied
    assert trainer_of(llama).parameters == sum(each.numel() for each in tied.values())


def test_the_digest_changes_with_the_weights_and_only_with_them(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer, other = trainer_of(), trainer_of()
    assert trainer.weights_digest() == other.weights_digest()
    trainer.train(*in_chunk(step_data), LossSpec())
    assert trainer.weights_digest() != other.weights_digest()


def test_a_saved_directory_is_a_model_with_its_tokenizer(
    tmp_path: Path, trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer, target = trainer_of(dtype="float32"), tmp_path / "deep" / "step_1"
    trainer.save(target)
    trainer.train(*in_chunk(step_data), LossSpec())
    trainer.save(target)
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    for name, weight in trainer.iterate_weights():
        assert torch.equal(loaded[name], weight)
    assert (target / "tokenizer.json").exists()
    assert (target / "model.safetensors").exists()
    assert [each.name for each in target.parent.iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_p": 0.9, "do_sample": False},
        {"temperature": 0.7},
    ],
)
def test_a_generation_config_that_transformers_refuses_to_write_is_exported_as_it_is(
    tmp_path: Path, qwen3: Path, trainer_of: MakeTrainer, settings: dict[str, Any]
) -> None:
    """Nothing may lose a trained model after its last step."""
    path = shutil.copytree(qwen3, tmp_path / "model")
    text = json.dumps({"eos_token_id": 1, **settings})
    (path / "generation_config.json").write_text(text)
    trainer = trainer_of(path, dtype="float32")
    trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").read_text() == text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config is not None
    assert generation_config_problem(path)
    assert not generation_config_problem(qwen3)


def test_what_a_model_does_to_its_logits_is_kept(
    tmp_path: Path, trainer_of: MakeTrainer, step_data: Step
) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, final_logit_softcapping=0.5)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, dtype="float32", shared_prompt=False)
    (columns,) = trainer.prepare_logprobs(
        build_chunk(step_data[0][:1]), policy=True, reference=False, temperature=1.0
    )
    flat = -torch.log(torch.tensor(64.0)).item()
    assert columns["policy_logprobs"] == pytest.approx(flat, abs=1.0)
