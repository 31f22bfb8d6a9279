"""Canaries of releases in float8 blocks: what an engine that holds them right computes, and wrong ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.sync import ObjectStoreSyncConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.failures import CanaryFailed
from offbeat.messages.weights import Canary, CanaryAnswer
from offbeat.plugins.float8.precision import BLOCK, FP8
from offbeat.plugins.float8.quantize import Quantized, dequantize, quantize
from offbeat.plugins.float8.trained_pass import as_quantized, has_quantized
from offbeat.trainers.expert_names import split_experts
from offbeat.trainers.torch import TorchTrainer
from offbeat.weight_sync import canary
from offbeat.weight_sync.dtypes import SCALE_SUFFIX, WirePolicy, wire_dtypes
from offbeat.weight_sync.wire_format import find_wire_format, wire_tensors

BLOCKS = WirePolicy("bfloat16", quantize="fp8_block")
FORMAT = find_wire_format("fp8_block")
DTYPES = wire_dtypes("bfloat16", ObjectStoreSyncConfig(quantize="fp8_block"))
Release = dict[str, Tensor]
DOWN = "model.layers.0.mlp.down_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=384))
    with torch.no_grad():
        made.get_parameter(GATE).mul_(0.25)
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trainer(model: Path) -> TorchTrainer:
    return trainer_of(model)


def trainer_of(path: Path, dtype: str = "bfloat16") -> TorchTrainer:
    settings = ModelConfig.model_validate({"path": str(path), "dtype": dtype})
    return TorchTrainer(
        path, trainer=TorchTrainerConfig(), model=settings, total_steps=1, max_model_len=64
    )


def canary_of(trainer: TorchTrainer, *, rounds_activations: bool = False) -> Canary:
    asked = canary.prompts(trainer.vocabulary, FORMAT.canary_prompts)
    expected = trainer.top_logprobs(asked, canary.KEPT, quantize="fp8_block")
    allowed = canary.tolerance(*DTYPES, rounds_activations=rounds_activations)
    return Canary(asked, *expected, allowed)


def released(trainer: TorchTrainer) -> Release:
    return {name: each.clone() for name, each in wire_tensors(trainer.iterate_weights(), BLOCKS)}


def loaded(path: Path, release: Release) -> PreTrainedModel:
    """Load a release as an engine does that computes in bfloat16 with matrices of float8 blocks."""
    engine = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.bfloat16)
    for name, each in engine.eval().state_dict(keep_vars=True).items():
        held = release.get(name)
        if held is not None and held.dtype == torch.float8_e4m3fn:
            held = dequantize(Quantized(held, release[name + SCALE_SUFFIX]), torch.float32)
        if held is not None:
            each.data.copy_(held)
    return engine


class RoundsActivations(nn.Linear):
    """A linear layer whose inputs are float8 as well, with a scale for each 128 of a token."""

    def forward(self, inputs: Tensor) -> Tensor:
        groups = inputs.float().unflatten(-1, (-1, BLOCK))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        rounded = (groups / scales).to(torch.float8_e4m3fn).float() * scales
        return functional.linear(rounded.flatten(-2).to(inputs.dtype), self.weight)


def answers(engine: PreTrainedModel, asked: tuple[tuple[int, ...], ...]) -> list[CanaryAnswer]:
    with torch.no_grad():
        logits = engine(torch.tensor(asked)).logits[:, -1]
    logprobs = logits.float().log_softmax(-1)
    return [CanaryAnswer(int(each.argmax()), float(each.max())) for each in logprobs]


def gap(sent: Canary, engine: PreTrainedModel) -> float:
    return canary.check(sent, answers(engine, sent.prompts), engine="e", epoch=1, version=1)


def test_an_engine_of_float8_matrices_computes_the_canary_but_for_its_own_rounding(
    model: Path, trainer: TorchTrainer
) -> None:
    engine = loaded(model, released(trainer))
    assert gap(canary_of(trainer), engine) <= canary.TOLERANCE_16_BIT / 4
    for name, each in list(engine.named_modules()):
        if isinstance(each, nn.Linear) and has_quantized(
            f"{name}.weight", tuple(each.weight.shape)
        ):
            each.__class__ = RoundsActivations
    assert gap(canary_of(trainer, rounds_activations=True), engine) <= canary.TOLERANCE_8_BIT


def doubled(release: Release) -> None:
    release[DOWN + SCALE_SUFFIX] *= 2


def zeroed(release: Release) -> None:
    release[DOWN].view(torch.uint8).zero_()


def with_scales_of_another(release: Release) -> None:
    first, second = DOWN + SCALE_SUFFIX, GATE + SCALE_SUFFIX
    release[first], release[second] = release[second].T, release[first].T


def with_reciprocal_scales(release: Release) -> None:
    release[DOWN + SCALE_SUFFIX].reciprocal_()


def with_a_shifted_block(release: Release) -> None:
    """The first rows' blocks lie one block further along the row."""
    rows = release[DOWN].view(torch.uint8)[:BLOCK]
    rows.copy_(rows.roll(BLOCK, dims=1))


@pytest.mark.parametrize(
    "bug", [doubled, zeroed, with_scales_of_another, with_reciprocal_scales, with_a_shifted_block]
)
def test_an_engine_that_holds_one_matrix_wrong_fails_the_canary(
    model: Path, trainer: TorchTrainer, bug: Callable[[Release], None]
) -> None:
    release = released(trainer)
    bug(release)
    with pytest.raises(CanaryFailed):
        gap(canary_of(trainer), loaded(model, release))


def test_the_trainer_s_weights_are_what_they_were_after_a_canary_even_of_a_failed_pass(
    trainer: TorchTrainer,
) -> None:
    before, digest = dict(trainer.module.named_parameters()), trainer.weights_digest()
    canary_of(trainer)

    def fail(*_: object) -> None:
        raise ArithmeticError

    broken = trainer.module.get_submodule(GATE.removesuffix(".weight"))
    hook = broken.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        trainer.top_logprobs([[1, 2]], 1, quantize="fp8_block")
    hook.remove()
    after = dict(trainer.module.named_parameters())
    assert all(after[name] is each for name, each in before.items())
    assert trainer.weights_digest() == digest


def test_experts_that_the_trainer_joins_are_rounded_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes: dict[str, Any] = SIZES | {
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    made.save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, "float32")
    asked = canary.prompts(trainer.vocabulary)
    got = trainer.top_logprobs(asked, canary.KEPT, quantize="fp8_block")
    plain = trainer.top_logprobs(asked, canary.KEPT)
    with torch.no_grad():
        for name, each in trainer.module.named_parameters():
            if has_quantized(name, tuple(each.shape)):
                each.copy_(as_quantized(name, each))
    assert trainer.top_logprobs(asked, canary.KEPT) == got != plain
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = made.get_parameter(name).detach()
    for expert, matrix in split_experts([(name, as_quantized(name, weight))]):
        whole = dict(split_experts([(name, weight)]))[expert]
        assert matrix.equal(dequantize(quantize(expert, whole), torch.float32))
    assert FP8 not in {str(each.dtype) for each in trainer.module.parameters()}
