"""What the controller tells a trainer, and what a trainer answers."""

from typing import Any

import msgspec


class LossSpec(msgspec.Struct, frozen=True):
    """The loss of one step. Every number it depends on is here.

    A policy gradient with importance ratio ``exp(logprob - old_logprob)``, clipped to
    ``[1 - clip_low, 1 + clip_high]``; a KL penalty to the reference policy; a truncated
    importance-sampling weight when old logprobs were recomputed by the trainer.
    """

    name: str = "clipped_pg"
    old_logprobs: str = "generation"  # generation | policy (recomputed before the step)
    clip_low: float = 0.2
    clip_high: float = 0.2
    tis_cap: float | None = None  # cap of exp(policy - generation logprob); None: no correction
    kl_coef: float = 0.0
    kl_kind: str = "k3"  # k1 | k3
    normalize: str = "tokens"  # tokens | sequences
    temperature: float = 1.0  # logprobs are of softmax(logits / temperature)

    @property
    def needs_policy_logprobs(self) -> bool:
        return self.old_logprobs == "policy"

    @property
    def needs_reference_logprobs(self) -> bool:
        return self.kl_coef > 0


class Chunk(msgspec.Struct, frozen=True):
    """The groups of one ``train_microbatch`` or ``prepare_logprobs`` call.

    ``payloads[i]`` are the handles of group i's columns: object references in production. They are
    opaque to the controller. ``advantages[i][j]`` belongs to sample j of group i; empty for
    ``prepare_logprobs``.
    """

    ordinals: tuple[int, ...]
    payloads: tuple[tuple[Any, ...], ...]
    advantages: tuple[tuple[float, ...], ...] = ()
    tokens: int = 0  # prompt and response tokens, over all groups


class ChunkResult(msgspec.Struct, frozen=True):
    """What one ``train_microbatch`` did. Sums, not means: nothing is normalised before finish."""

    tokens: int  # with loss mask set
    sequences: int
    microbatches: int
    compute_s: float


class StepResult(msgspec.Struct, frozen=True):
    """What ``finish_train_step`` reports. ``applied`` False: weights are as before the step."""

    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    sequences: int
    chunks: int
    metrics: dict[str, float]
    reason: str = ""  # why it was not applied
    compute_s: float = 0.0


class TrainerState(msgspec.Struct, frozen=True):
    """What a trainer knows of itself, for a controller that (re)connects."""

    ranks: int
    version: int  # optimizer steps applied
    last_step: int  # last applied step, 0 when none
    last_attempt: int
    parameters: int
    digest: str  # of the weights


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is complete on disk."""

    version: int
    digest: str  # of the weights
    nbytes: int
    write_s: float


class PreparedColumns(msgspec.Struct, frozen=True):
    """What ``prepare_logprobs`` wrote: one further payload a group, in the order of the chunk."""

    columns: tuple[str, ...]
    payload_bytes: tuple[int, ...]
    payloads: tuple[Any, ...]
