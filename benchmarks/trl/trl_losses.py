"""Computes TRL's loss and its gradient on batches given as JSON; writes them as JSON.

    .venv-trl/bin/python benchmarks/trl/trl_losses.py < batches.json

Runs in the peer's own environment (README.md beside this file). ``GRPOTrainer._compute_loss`` of the
installed TRL is called as it is, on an object that has the settings and, instead of a model, the
log-probabilities and entropies of the batch. The importance weights against the engine are made
before that, in a method that samples: they are computed here, by its formulas.

Input: a list of objects with ``settings`` and the padded matrices of a batch. Output: for each its
``loss``, and ``gradient`` and ``entropy_gradient`` as matrices.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer

DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "delta": None,
    "use_bias_correction_kl": True,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "vllm_importance_sampling_mode": None,  # None: no vLLM
    "vllm_importance_sampling_clip_max": 3.0,
    "max_completion_length": 0,
}


def trainer_of(settings: dict[str, Any], logps: Tensor, entropies: Tensor) -> SimpleNamespace:
    """Return what ``_compute_loss`` reads of a trainer."""
    has_vllm = settings["vllm_importance_sampling_mode"] is not None
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,  # noqa: ARG005 -- called by name
        ),
        args=SimpleNamespace(
            delta=settings["delta"],
            use_bias_correction_kl=settings["use_bias_correction_kl"],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        use_vllm=has_vllm,
        vllm_importance_sampling_correction=has_vllm,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{
            name: settings[name]
            for name in (
                "loss_type",
                "importance_sampling_level",
                "epsilon_low",
                "epsilon_high",
                "beta",
                "off_policy_mask_threshold",
                "entropy_coef",
                "max_completion_length",
            )
        },
    )


def engine_weights(settings: dict[str, Any], gap: Tensor) -> Tensor:
    """Return the weights against the engine, from old minus sampling log-probabilities."""
    mode, cap = (
        settings["vllm_importance_sampling_mode"],
        settings["vllm_importance_sampling_clip_max"],
    )
    weight = (gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap).exp()
    if mode.endswith("truncate"):
        return weight.clamp(max=cap)
    return weight.masked_fill(weight > cap, 0.0)


def loss_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's loss of one batch, and its gradients."""
    settings = DEFAULTS | case["settings"]
    names = ("logps", "old", "sampling", "reference", "mask", "entropies", "advantages")
    logps, old, sampling, reference, mask, entropies, advantages = (
        torch.tensor(case[name], dtype=torch.float64) for name in names
    )
    logps.requires_grad_()
    entropies.requires_grad_()
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if settings["vllm_importance_sampling_mode"] is not None:
        inputs["importance_sampling_ratio"] = engine_weights(settings, (old - sampling) * mask)
    loss = GRPOTrainer._compute_loss(trainer_of(settings, logps, entropies), None, inputs)  # noqa: SLF001 -- the peer's formula is what is compared
    gradients = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
    gradient, bonus = (
        torch.zeros_like(mask) if each is None else each.detach() for each in gradients
    )
    return {
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "entropy_gradient": bonus.tolist(),
    }


if __name__ == "__main__":
    answers = [loss_of(case) for case in json.load(sys.stdin)]
    json.dump({"version": trl.__version__, "answers": answers}, sys.stdout)
