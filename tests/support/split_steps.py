"""A split step of a torch trainer, as the controller would call it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClipRangeLossConfig
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.state import TorchState
from offbeat.transfer_queue.tensordict_codec import build_chunk

MakeTrainer = Callable[..., TorchTrainer]
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]


def state_of(trainer: TorchTrainer) -> TorchState:
    """Weights and optimizer of a torch trainer."""
    assert isinstance(trainer.model_state, TorchState)
    return trainer.model_state


def run_step(
    trainer: TorchTrainer,
    step: Step,
    loss: LossSpec,
    chunks: int,
    number: int = 1,
    minibatches: Sequence[int] = (),
) -> StepResult:
    groups, advantages = step
    of_groups = minibatches or (0,) * len(groups)
    key = StepKey(number, number, 0)
    trainer.begin_train_step(key, loss)
    for part in np.array_split(np.arange(len(groups)), chunks):
        key = key.next()
        trainer.train_microbatch(
            key,
            build_chunk([groups[i] for i in part]),
            [advantages[i] for i in part],
            [of_groups[i] for i in part],
        )
    return trainer.finish_train_step(key.next())


def worst_relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, over that tensor's largest value."""
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def naive_gradients(
    trainer: TorchTrainer,
    step: Step,
    loss: LossSpec,
    inputs_of: Callable[[dict[str, Any], Tensor], dict[str, Tensor]] = lambda *_: {},
) -> dict[str, Tensor]:
    """The same gradient the slow way: one unpadded sequence at a time, autograd's own softmax.

    ``inputs_of`` a group and token ids are what their forward pass takes besides.
    """
    model, total = trainer.module, torch.zeros((), dtype=torch.float64)
    tokens, sequences, config = 0, 0, loss.config
    assert isinstance(config, ClipRangeLossConfig)
    for group, group_advantages in zip(*step, strict=True):
        offsets = group["response_offsets"]
        for i, advantage in enumerate(group_advantages):
            own = slice(offsets[i], offsets[i + 1])
            ids = np.concatenate([group["prompt_ids"], group["response_ids"][own]])
            row = torch.tensor(ids, dtype=torch.int64)[None]
            logits = model(input_ids=row, **inputs_of(group, row)).logits[0]
            logprobs = torch.log_softmax(logits / loss.temperature, -1)
            first, mask = len(group["prompt_ids"]), group["loss_mask"][own]
            terms = list[Tensor]()
            for t in np.flatnonzero(mask):
                logprob = logprobs[first + t - 1, ids[first + t]]
                generation = float(group["generation_logprobs"][own][t])
                old = float(group["policy_logprobs"][own][t])
                if config.old_logprobs == "generation":
                    old = generation
                ratio = torch.exp(logprob - old)
                bounded = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
                term = -torch.minimum(ratio * advantage, bounded * advantage)
                if config.tis_cap is not None:
                    term = term * min(math.exp(old - generation), config.tis_cap)
                if config.kl_coef:
                    gap = float(group["reference_logprobs"][own][t]) - logprob
                    term = term + config.kl_coef * (torch.exp(gap) - gap - 1)
                terms.append(term)
            if terms:
                tokens, sequences = tokens + len(terms), sequences + 1
                part = torch.stack(terms)
                total = total + (part.sum() if config.normalize == "tokens" else part.mean())
    (total / (tokens if config.normalize == "tokens" else sequences)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def raw_gradients(
    trainer: TorchTrainer, step: Step, loss: LossSpec, chunks: int, attempt: int = 1
) -> dict[str, Tensor]:
    """Gradients of an open step, normalised as finish would; the step is then aborted."""
    groups, advantages = step
    key = StepKey(1, attempt, 0)
    trainer.begin_train_step(key, loss)
    counts = list[int]()
    for part in np.array_split(np.arange(len(groups)), chunks):
        key = key.next()
        result = trainer.train_microbatch(
            key, build_chunk([groups[i] for i in part]), [advantages[i] for i in part]
        )
        counts.append(result.tokens if loss.config.normalize == "tokens" else result.sequences)
    gradients = {
        name: each.grad.clone() / sum(counts)
        for name, each in trainer.module.named_parameters()
        if each.grad is not None
    }
    trainer.abort_train_step(key)
    return gradients
