"""Trainer and engine on the device against plain loops in float64 on the CPU."""

from pathlib import Path
from typing import Final, Literal

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.messages.fences import StepKey
from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.gpu import plain
from tests.gpu.conftest import Measured

VOCABULARY: Final = 512
TOKENS: Final = 32
LOSS: Final = LossSpec(
    ClippedPgLossConfig(old_logprobs="policy", clip_low=plain.CLIP, clip_high=plain.CLIP)
)
UPDATE_BOUNDS: Final = {"float32": 1e-4, "bfloat16": 0.3}
LOGPROB_BOUNDS: Final = {"float32": 1e-4, "bfloat16": 0.3}
Dtype = Literal["float32", "bfloat16"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    directory = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def make_trainer(path: Path, device: str, dtype: Dtype) -> TorchTrainer:
    return TorchTrainer(
        path,
        trainer=TorchTrainerConfig(
            device=device, optimizer=OptimizerConfig.model_validate(plain.OPTIMIZER)
        ),
        model=ModelConfig(path=str(path), dtype=dtype),
        total_steps=10,
        max_model_len=256,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_split_step_updates_as_a_plain_loop_in_float64(
    path: Path, device: str, dtype: Dtype, measured: Measured
) -> None:
    """bfloat16 computes in 16 bits and keeps its weights in 32, so the update is in full precision."""
    trainer, step = make_trainer(path, device, dtype), plain.make_step(VOCABULARY)
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, LOSS)
    for half in (slice(0, 1), slice(1, None)):
        key = key.next()
        chunk = build_chunk(step.groups[half])
        trainer.train_microbatch(key, chunk, step.advantages[half])
    result = trainer.finish_train_step(key.next())
    assert result.applied
    model = plain.load_in_float64(path)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    plain.train_step(model, step)
    got = dict(trainer.weights.iterate())
    error = plain.worst_update_error(got, dict(model.named_parameters()), before)
    measured("error of a step, relative to the largest update", error, "", dtype)
    assert error < UPDATE_BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_with_a_shared_prompt_have_the_logprobs_of_single_rows(
    path: Path, device: str, dtype: Dtype, measured: Measured
) -> None:
    trainer, step = make_trainer(path, device, dtype), plain.make_step(VOCABULARY)
    columns = trainer.prepare_logprobs(
        build_chunk(step.groups), policy=True, reference=False, temperature=1.0
    )
    model = plain.load_in_float64(path)
    with torch.no_grad():
        want = [plain.group_logprobs(model, group).numpy() for group in step.groups]
    got = [each["policy_logprobs"] for each in columns]
    error = max(float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True))
    measured("error of the trainer's logprobs", error, "nats", dtype)
    assert error < LOGPROB_BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_reports_the_logprobs_of_what_it_sampled(
    path: Path, device: str, dtype: Dtype, measured: Measured
) -> None:
    engine = EmbeddedEngine(
        load_model(str(path), getattr(torch, dtype), device, trust_remote_code=False),
        name="engine",
        incarnation="1",
        eos_token_ids=(),
        max_sequences=8,
        max_model_len=256,
        deterministic=False,
        seed=0,
        device=device,
    )
    prompts = {"long": tuple(range(3, 40)), "short": (7, 8, 9)}
    for name, prompt in prompts.items():
        engine.submit(GenerateRequest(name, prompt, 4, SamplingParams(max_new_tokens=TOKENS)))
    results = list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]()
    while engine.has_work:
        for each in engine.step():
            results.append((each.request_id, each.token_ids, each.logprobs, each.offsets))
    assert len(results) == len(prompts)
    model, errors = plain.load_in_float64(path), list[float]()
    for name, ids, logprobs, offsets in results:
        assert len(ids) == 4 * TOKENS
        group = {"prompt_ids": prompts[name], "response_ids": ids, "response_offsets": offsets}
        with torch.no_grad():
            want = plain.group_logprobs(model, group).numpy()
        errors.append(float(np.abs(logprobs - want).max()))
    measured(f"error of the engine's logprobs, {TOKENS} tokens", max(errors), "nats", dtype)
    assert max(errors) < LOGPROB_BOUNDS[dtype]
