"""Requests of the controller to a trainer, and their results."""

from typing import Any

import msgspec


class LossSpec(msgspec.Struct, frozen=True):
    """The loss of one step. Every number it depends on is here.

    A surrogate chosen by name, with importance ratio ``exp(logprob - old_logprob)`` and bounds
    ``[1 - clip_low, 1 + clip_high]``; weights that correct for an engine whose policy is not the
    old one, from ``k = exp(old_logprob - generation_logprob)``; a KL penalty to the reference
    policy. The formulas: ``offbeat.algorithms.losses``.
    """

    name: str = "clipped_pg"  # clipped_pg | gspo | cispo | sft
    old_logprobs: str = "generation"  # generation | policy (recomputed before the step) | current
    clip_low: float = 0.2
    clip_high: float = 0.2
    tis_cap: float | None = None  # cap of k by token; None: no truncated weight
    kl_coef: float = 0.0
    kl_kind: str = "k3"  # k1 | k2 | k3
    normalize: str = "tokens"  # tokens | sequences | constant
    temperature: float = 1.0  # logprobs are of softmax(logits / temperature)
    dual_clip: float | None = None  # ratios above it, with negative advantage, have no gradient
    icepop_band: tuple[float, float] | None = None  # k by token, as a weight; outside: 0
    # K of a sequence; outside, all of its tokens have weight 0
    sequence_band: tuple[float, float] | None = None
    sequence_statistic: str = "geometric"  # geometric | product: k of a sequence
    sequence_weights: bool = False  # whether a kept sequence is weighted by its k, not 1
    count_dropped: bool = True  # whether dropped tokens count in the divisor of the loss
    constant_tokens: int | None = None  # normalize=constant: divisor per sequence
    # Whether advantages are divided by their standard deviation over the step
    step_std: bool = False

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

    prompt_indices: tuple[int, ...]
    payloads: tuple[tuple[Any, ...], ...]
    advantages: tuple[tuple[float, ...], ...] = ()
    tokens: int = 0  # prompt and response tokens, over all groups
    group_tokens: tuple[int, ...] = ()  # tokens of each group; empty: all count alike


class ChunkResult(msgspec.Struct, frozen=True):
    """Result of one ``train_microbatch``. Sums, not means: finish normalises them."""

    tokens: int  # with loss mask set
    sequences: int
    microbatches: int
    compute_s: float


class StepResult(msgspec.Struct, frozen=True):
    """Result of ``finish_train_step``. ``applied`` False: weights are as before the step."""

    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    sequences: int
    chunks: int
    metrics: dict[str, float]
    reason: str = ""  # why it was not applied; empty if it was
    compute_s: float = 0.0


class TrainerState(msgspec.Struct, frozen=True):
    """State of a trainer, for a controller that (re)connects."""

    ranks: int
    version: int  # optimizer steps applied
    last_step: int  # last applied step, 0 when none
    last_attempt: int
    parameters: int
    digest: str  # of the weights
    incarnation: str = ""  # identifies rank 0's process; the ranks are replaced together
    initial_digest: str = ""  # of the weights that model.path held when its process began


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is complete on disk."""

    version: int
    digest: str  # of the weights
    nbytes: int
    write_s: float


class PreparedColumns(msgspec.Struct, frozen=True):
    """Result of ``prepare_logprobs``: one further payload per group, in the order of the chunk."""

    columns: tuple[str, ...]
    payload_bytes: tuple[int, ...]
    payloads: tuple[Any, ...]
