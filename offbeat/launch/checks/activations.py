"""Says what a microbatch of the torch trainer takes besides weights, gradients and moments.

It loads torch, whose import takes seconds: only recipes with a model import it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from offbeat.config.limits import trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.launch.checks.machine import Machine
from offbeat.messages.finding import Finding, ok, size, warning
from offbeat.models.loading import model_without_memory
from offbeat.models.media_rules import media_rules
from offbeat.trainers.torch.activation_bytes import activation_bytes
from offbeat.trainers.torch.proof import prove_kind
from offbeat.transfer_queue.schema import Columns

_SUBJECT = "activations"


def check_activations(config: RunConfig, machine: Machine) -> Iterator[Finding]:
    """Estimate the activations of a microbatch of samples of full length, on each rank.

    Nothing for other trainers, adapters and models with pictures, and for what cannot be estimated.
    """
    trainer = config.trainer
    if not isinstance(trainer, TorchTrainerConfig):
        return
    found = estimated_activations(config, _full_groups(config, trainer))
    if found is None:
        return
    nbytes, (rows, tokens) = found
    recomputed = str(trainer.activation_checkpointing).lower()
    seen = (
        f"about {size(nbytes)} on each rank in a microbatch of {rows} x {tokens} tokens, samples of full "
        f"length, with trainer.activation_checkpointing={recomputed}"
    )
    if trainer.device == "cpu" and nbytes * trainer_ranks(config) > machine.memory_free_bytes:
        fix = "Lower trainer.max_tokens_per_microbatch, or set trainer.activation_checkpointing to true."
        yield warning(_SUBJECT, f"{seen}; {size(machine.memory_free_bytes)} free", fix)
    else:
        yield ok(_SUBJECT, seen)


def estimated_activations(
    config: RunConfig, groups: Sequence[Columns]
) -> tuple[int, tuple[int, int]] | None:
    """Return the bytes of the largest microbatch of the groups, and its rows and tokens per row.

    None for trainers other than torch, adapters, models with pictures, code of a model's directory,
    and what ``activation_bytes`` cannot count.

    Raises:
        UntrainableModel: No kind of rows is exact for the model.
    """
    trainer = config.trainer
    if not isinstance(trainer, TorchTrainerConfig) or model_is_frozen(config):
        return None
    path, length = Path(config.model.path), config.generator.max_model_len
    if config.model.trust_remote_code:
        return None
    model = model_without_memory(path, trust_remote_code=False)
    if media_rules(model.config).reads_media:
        return None
    proof = prove_kind(type(model), model.config, length, shared_prompt=trainer.shared_prompt)
    dtype = getattr(torch, config.model.dtype)
    return activation_bytes(model.config, groups, trainer, dtype, proof)


def _full_groups(config: RunConfig, trainer: TorchTrainerConfig) -> list[dict[str, np.ndarray]]:
    """Return as many groups of samples of full length as fill a microbatch, or as a step has."""
    length, samples = config.generator.max_model_len, config.samples_per_group
    new = min(config.generator.sampling.max_new_tokens, length - 1)
    prompt = length - new
    in_step = -(-config.groups_per_step // (config.algorithm.minibatches * trainer.data_parallel))
    fill = -(-trainer.max_tokens_per_microbatch // (prompt + samples * new))
    group = {
        "prompt_ids": np.zeros(prompt, np.int32),
        "response_ids": np.zeros(samples * new, np.int32),
        "response_offsets": np.arange(samples + 1, dtype=np.int64) * new,
        "loss_mask": np.ones(samples * new, np.bool_),
    }
    return [group] * max(1, min(in_step, fill))
