"""Random tokens, tiny models' sizes, and the torch trainer that answers for what is right."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_cases import Outcome
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from offbeat.actors.trainers.torch_backend import TorchTrainer
from offbeat.config.run import ModelConfig
from offbeat.config.training import OptimizerConfig, TrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.messages.training import LossSpec

SIZES: dict[str, Any] = {
    "vocab_size": 63,  # odd, so that two ranks pad it
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FULL = LossSpec(old_logprobs="policy", tis_cap=2.0, kl_coef=0.1, clip_low=0.4, clip_high=0.6)
BY_SEQUENCES = LossSpec(normalize="sequences", temperature=0.7)
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]


def compute_norms_in_float64(model: nn.Module) -> None:
    """transformers rounds the input of every RMS norm to float32: 1e-7 of noise in the gradient."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm)):
                exact = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)


def reference(path: Path, **optimizer: Any) -> TorchTrainer:
    """The torch trainer in float64, whose gradient is held against plain autograd elsewhere."""
    options = {"learning_rate": 1e-2} | optimizer
    trainer = TorchTrainer(
        path,
        trainer=TrainerConfig(optimizer=OptimizerConfig.model_validate(options)),
        model=ModelConfig(path=str(path), dtype="float64"),
        total_steps=10,
    )
    compute_norms_in_float64(trainer.module)
    if trainer.module.config.model_type == "qwen3_moe":
        trainer.module.set_experts_implementation("eager")  # the grouped one knows no float64
    return trainer


def hf_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def group(rng: np.random.Generator, prompt: int, lengths: Any) -> dict[str, Any]:
    total = int(sum(lengths))
    logprobs = (-4 + rng.normal(0, 0.3, (3, total))).astype(np.float32)
    return {
        "prompt_ids": rng.integers(0, 63, prompt, dtype=np.int32),
        "response_ids": rng.integers(0, 63, total, dtype=np.int32),
        "response_offsets": np.cumsum([0, *lengths]).astype(np.int64),
        "loss_mask": rng.random(total) >= 0.2,
        "generation_logprobs": logprobs[0],
        "policy_logprobs": logprobs[1],
        "reference_logprobs": logprobs[2],
        "weight_versions": np.zeros(total, np.int32),
        "rewards": rng.random(len(lengths)).astype(np.float32),
    }


def worst_relative_error(got: dict[str, Any], want: dict[str, Any]) -> float:
    """Largest difference of any tensor, over that tensor's largest value."""
    assert got.keys() == want.keys()
    return max(float(np.abs(got[n] - want[n]).max() / np.abs(want[n]).max()) for n in want)


def torch_step(path: Path, step: Step, loss: LossSpec) -> Outcome:
    """What the torch trainer makes of a step: gradients before clipping, and its result."""
    trainer = reference(path, max_grad_norm=None)
    groups, advantages = step
    trainer.begin_train_step(StepKey(1, 1, 0), loss)
    counts = trainer.train_microbatch(StepKey(1, 1, 1), groups, advantages)
    divisor = counts.tokens if loss.normalize == "tokens" else counts.sequences
    parameters = trainer.module.named_parameters()
    gradients = {n: each.grad.numpy() / divisor for n, each in parameters if each.grad is not None}
    gradients = one_by_one(gradients)
    return Outcome(trainer.finish_train_step(StepKey(1, 1, 2)), gradients, {}, in_step=True)


def one_by_one(tensors: dict[str, Any]) -> dict[str, Any]:
    """transformers holds the experts of a layer in two tensors, and writes them one by one."""
    named = dict[str, Any]()
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            named[name] = tensor
            continue
        for expert, each in enumerate(tensor):
            inside = f"{prefix}.{expert}"
            if kind == "down_proj":
                named[f"{inside}.down_proj.weight"] = each
            else:
                gate, up = np.split(each, 2)
                named |= {f"{inside}.gate_proj.weight": gate, f"{inside}.up_proj.weight": up}
    return named
