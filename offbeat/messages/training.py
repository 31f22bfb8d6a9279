"""Requests of the controller to a trainer, and their results."""

from typing import Any

import msgspec


class Chunk(msgspec.Struct, frozen=True):
    """Groups of one ``train_microbatch`` or ``prepare_logprobs`` call.

    ``payloads[i]`` are the handles of group i's columns: object references in production. They are
    opaque to the controller. ``advantages[i][j]`` belongs to sample j of group i. ``advantages`` is
    empty for ``prepare_logprobs``.
    """

    prompt_indices: tuple[int, ...]
    payloads: tuple[tuple[Any, ...], ...]
    advantages: tuple[tuple[float, ...], ...] = ()
    tokens: int = 0  # prompt and response tokens, over all groups
    group_tokens: tuple[int, ...] = ()  # tokens of each group; empty: all count equally
    minibatches: tuple[int, ...] = ()  # minibatch of each group, from 0; empty: only one


class ChunkResult(msgspec.Struct, frozen=True):
    """Result of one ``train_microbatch``. It holds sums, which finish normalises."""

    tokens: int  # with loss mask set
    sequences: int
    microbatches: int
    compute_s: float


class StepResult(msgspec.Struct, frozen=True):
    """Result of ``finish_train_step``. If ``applied`` is False, weights are as before the step."""

    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # of the step, counted once even if trained repeatedly
    sequences: int
    chunks: int
    metrics: dict[str, float]
    reason: str = ""  # why it was not applied; empty if it was
    compute_s: float = 0.0
    speed: dict[str, float] = msgspec.field(default_factory=dict[str, float])  # metrics of time


class TrainerState(msgspec.Struct, frozen=True):
    """State of a trainer, for a controller that (re)connects."""

    ranks: int
    version: int  # steps applied
    last_step: int  # last applied step, 0 if none
    last_attempt: int
    parameters: int
    digest: str  # of the weights
    incarnation: str = ""  # identifies rank 0's process; the ranks are replaced together
    initial_digest: str = ""  # of the weights that model.path held when its process began


class Checkpoint(msgspec.Struct, frozen=True):
    """Checkpoint that is complete on disk."""

    version: int
    digest: str  # of the weights
    nbytes: int


class PreparedColumns(msgspec.Struct, frozen=True):
    """Result of ``prepare_logprobs``: one additional payload per group, in the chunk's order."""

    columns: tuple[str, ...]
    payload_bytes: tuple[int, ...]
    payloads: tuple[Any, ...]
