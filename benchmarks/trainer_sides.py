"""The two sides of the trainer benchmark: a loop as one would write it by hand, and the split step.

Both take the columns of prompt groups and leave updated weights behind, a step a call. Legend: S
samples, T tokens of a row, L tokens of a response, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.trainer_cases import Advantages, Groups
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk

CLIP = ClippedPgLossConfig()
LOSS = LossSpec(CLIP)
OPTIMIZER = OptimizerConfig(learning_rate=1e-5)
MAX_MODEL_LEN = 512  # no sample of a case is longer


class Setting(NamedTuple):
    """Settings that both sides get."""

    path: Path  # Hugging Face directory
    device: str
    dtype: Literal["float32", "bfloat16"]
    max_tokens: int  # of a microbatch


class Outcome(NamedTuple):
    """Results of a step, so that both sides can be seen to do the same."""

    loss: float
    grad_norm: float


class Side(Protocol):
    """Takes a step at a time."""

    def step(self, groups: Groups, advantages: Advantages, chunks: int = 1) -> Outcome:
        """Train all groups in one optimizer step, in so many parts."""
        ...


class Plain:
    """A plain PyTorch loop: one padded row a sample, autograd, clipping, fused AdamW. No more.

    Of the usual economies it has those that cost a line: no mask where causal attention needs none,
    no logits of the prompt, no cache.
    """

    def __init__(self, setting: Setting) -> None:
        dtype = getattr(torch, setting.dtype)
        model = AutoModelForCausalLM.from_pretrained(setting.path, dtype=dtype)
        self.model = model.to(torch.device(setting.device))  # pyright: ignore[reportArgumentType]
        self._device, self._max_tokens = setting.device, setting.max_tokens
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=OPTIMIZER.learning_rate,
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )

    def step(self, groups: Groups, advantages: Advantages, chunks: int = 1) -> Outcome:
        loss = self.backward(groups, advantages, chunks)
        return Outcome(loss, self.update())

    def backward(self, groups: Groups, advantages: Advantages, chunks: int = 1) -> float:
        """Leave the gradients of the whole batch; returns its loss."""
        tokens = sum(len(group["response_ids"]) for group in groups)
        loss = torch.zeros((), device=self._device)
        for part in _parts(len(groups), chunks):
            ids_ST, response_tokens = _rows(groups[part])
            old_SL = _by_sample(groups[part], "generation_logprobs", response_tokens)
            advantages_S = np.concatenate(advantages[part]).astype(np.float32)
            for rows in self._microbatches(*ids_ST.shape):
                logprobs_SL = self._logprobs(self._tensor(ids_ST[rows]), response_tokens)
                ratio_SL = torch.exp(logprobs_SL - self._tensor(old_SL[rows]))
                bounded_SL = ratio_SL.clamp(1 - CLIP.clip_low, 1 + CLIP.clip_high)
                gain_S = self._tensor(advantages_S[rows])[:, None]
                share = -torch.minimum(ratio_SL * gain_S, bounded_SL * gain_S).sum() / tokens
                share.backward()
                loss += share.detach()
        return loss.item()

    def update(self) -> float:
        """Clip, step, drop the gradients; returns their norm before clipping."""
        limit = OPTIMIZER.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def logprobs(self, groups: Groups) -> NDArray[np.float32]:
        """[S, L]: of every response token, under the present weights."""
        ids_ST, response_tokens = _rows(groups)
        parts = [
            self._logprobs(self._tensor(ids_ST[rows]), response_tokens).float().cpu()
            for rows in self._microbatches(*ids_ST.shape)
        ]
        return torch.cat(parts).numpy()

    def _logprobs(self, ids_ST: Tensor, response_tokens: int) -> Tensor:
        logits_SLV = self.model(
            input_ids=ids_ST[:, :-1], use_cache=False, logits_to_keep=response_tokens
        ).logits.float()
        chosen_SL = logits_SLV.gather(-1, ids_ST[:, -response_tokens:, None])[..., 0]
        return chosen_SL - torch.logsumexp(logits_SLV, -1)

    def _microbatches(self, samples: int, width: int) -> list[slice]:
        rows = max(1, self._max_tokens // (width - 1))
        return [slice(first, first + rows) for first in range(0, samples, rows)]

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


class Split:
    """The product: ``begin_train_step``, a ``train_microbatch`` a chunk, ``finish_train_step``."""

    def __init__(self, setting: Setting, *, shared_prompt: bool) -> None:
        self.trainer = TorchTrainer(
            setting.path,
            trainer=TorchTrainerConfig(
                device=setting.device,
                shared_prompt=shared_prompt,
                max_tokens_per_microbatch=setting.max_tokens,
                optimizer=OPTIMIZER,
            ),
            model=ModelConfig(path=str(setting.path), dtype=setting.dtype),
            total_steps=1_000_000,
            max_model_len=MAX_MODEL_LEN,
        )
        self._key = StepKey(0, 0, 0)

    def step(self, groups: Groups, advantages: Advantages, chunks: int = 1) -> Outcome:
        self.begin()
        self.microbatches(groups, advantages, chunks)
        return self.finish()

    def begin(self) -> None:
        """Open the next step."""
        self._key = StepKey(self._key.step + 1, self._key.attempt + 1, 0)
        self.trainer.begin_train_step(self._key, LOSS)

    def microbatches(self, groups: Groups, advantages: Advantages, chunks: int = 1) -> None:
        """Accumulate all groups, chunk by chunk."""
        for part in _parts(len(groups), chunks):
            self._key = self._key.next()
            self.trainer.train_microbatch(self._key, build_chunk(groups[part]), advantages[part])

    def finish(self) -> Outcome:
        """Step the optimizer."""
        self._key = self._key.next()
        result = self.trainer.finish_train_step(self._key)
        if not result.applied:
            raise RuntimeError(f"the step was not applied: {result.reason}")
        return Outcome(result.loss, result.grad_norm)


def _parts(groups: int, chunks: int) -> list[slice]:
    """Equal parts, the last one shorter where they do not divide."""
    size = -(-groups // chunks)
    return [slice(first, first + size) for first in range(0, groups, size)]


def _rows(groups: Groups) -> tuple[NDArray[np.int64], int]:
    """Token ids [S, T], a row a sample; and L."""
    prompt_tokens = len(groups[0]["prompt_ids"])
    samples = [len(group["response_offsets"]) - 1 for group in groups]
    response_tokens = len(groups[0]["response_ids"]) // samples[0]
    ids_ST = np.empty((sum(samples), prompt_tokens + response_tokens), np.int64)
    prompts = np.stack([group["prompt_ids"] for group in groups])
    ids_ST[:, :prompt_tokens] = np.repeat(prompts, samples, axis=0)
    ids_ST[:, prompt_tokens:] = _by_sample(groups, "response_ids", response_tokens)
    return ids_ST, response_tokens


def _by_sample(groups: Sequence[dict[str, NDArray]], name: str, tokens: int) -> NDArray:
    return np.concatenate([group[name] for group in groups]).reshape(-1, tokens)
