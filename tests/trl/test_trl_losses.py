"""Presets against the installed TRL: loss and gradient of the same batch, by its own code."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.divisors import denominator
from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.config.sections.algorithm import AlgorithmConfig

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trl" / "trl_losses.py"
ROWS, TOKENS = 6, 8

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"preset": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": (
        {"preset": "dr_grpo", "loss": {"constant_tokens": TOKENS}},
        {"loss_type": "dr_grpo", "max_completion_length": TOKENS},
    ),
    "dapo": ({"preset": "dapo"}, {"epsilon_high": 0.28}),
    "gspo": (
        {"preset": "gspo"},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": ({"preset": "sapo"}, {"loss_type": "sapo"}),
    "trl_vllm": ({"preset": "trl_vllm"}, {"vllm_importance_sampling_mode": "sequence_mask"}),
    "tis": (
        {"preset": "tis"},
        {
            "epsilon_high": 0.28,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
    ),
    "sequence_cap": (
        {"loss": {"old_logprobs": "policy", "sequence_cap": 1.5}},
        {
            "vllm_importance_sampling_mode": "sequence_truncate",
            "vllm_importance_sampling_clip_max": 1.5,
        },
    ),
    "kl": ({"loss": {"kl_coef": 0.1}}, {"beta": 0.1, "use_bias_correction_kl": False}),
    "kl_unbiased": ({"loss": {"kl_coef": 0.1, "kl_gradient": "unbiased"}}, {"beta": 0.1}),
    "dual_clip": ({"loss": {"dual_clip": 1.5}}, {"delta": 1.5}),
    "off_policy": ({"loss": {"off_policy_delta": 0.05}}, {"off_policy_mask_threshold": 0.05}),
    "entropy": ({"loss": {"entropy_coef": 0.1}}, {"entropy_coef": 0.1}),
}
"""A section ``algorithm``, and TRL's settings for the same."""

ROUNDED = {"sapo": 1e-7}
"""Relative error where TRL computes in less than float64: its temperatures are float32."""


def batch(name: str) -> dict[str, Tensor]:
    """Responses of different lengths, and policies that differ; float64."""
    rng = torch.Generator().manual_seed(len(name))

    def normal(scale: float, *size: int) -> Tensor:
        return scale * torch.randn(*size, generator=rng, dtype=torch.float64)

    sampling = -2 + normal(0.5, ROWS, TOKENS)
    logps = sampling + normal(1e-3 if name == "gspo" else 0.4, ROWS, TOKENS)
    loss = AlgorithmConfig.model_validate(CASES[name][0]).loss
    old = sampling if loss.name == "sft" or loss.old_logprobs == "generation" else logps
    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=rng)
    return {
        "logps": logps,
        "old": old + (normal(0.2, ROWS, TOKENS) if name == "sequence_cap" else 0.0),
        "sampling": sampling,
        "reference": sampling + normal(0.7, ROWS, TOKENS),
        "mask": (torch.arange(TOKENS) < lengths).double(),
        "entropies": normal(1.0, ROWS, TOKENS).abs(),
        "advantages": normal(1.0, ROWS),
    }


@pytest.fixture(scope="module")
def answers(trl_python: Path) -> dict[str, dict[str, Any]]:
    """What TRL answers to every case; its imports take most of the time."""
    asked = [
        {"settings": settings, **{key: value.tolist() for key, value in batch(name).items()}}
        for name, (_, settings) in CASES.items()
    ]
    done = subprocess.run(
        [trl_python, SCRIPT], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    return dict(zip(CASES, json.loads(done.stdout)["answers"], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, answers: dict[str, dict[str, Any]]) -> None:
    config = AlgorithmConfig.model_validate(CASES[name][0]).loss
    given = batch(name)
    logps, entropies = given["logps"].requires_grad_(), given["entropies"].requires_grad_()
    kept = given["mask"] > 0
    sequence_N = torch.arange(ROWS)[:, None].expand_as(kept)[kept]
    tokens = LossTokens(
        logprobs_N=logps[kept],
        old_N=given["old"][kept],
        generation_N=given["sampling"][kept],
        reference_N=given["reference"][kept],
        advantages_N=given["advantages"][sequence_N],
        mask_N=torch.ones_like(sequence_N, dtype=torch.bool),
        sequence_N=sequence_N,
        sequences=ROWS,
        entropy_N=entropies[kept],
    )
    sums = LOSSES[config.name](tokens, config)
    loss = sums.loss / denominator(config, [sums.divisor.tolist()])
    gradients = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
    theirs, rel = answers[name], ROUNDED.get(name, 1e-12)
    assert loss.item() == pytest.approx(theirs["loss"], rel=rel)
    for got, key in zip(gradients, ("gradient", "entropy_gradient"), strict=True):
        want = torch.tensor(theirs[key], dtype=torch.float64)
        assert torch.allclose(torch.zeros_like(want) if got is None else got, want, rtol=100 * rel)
