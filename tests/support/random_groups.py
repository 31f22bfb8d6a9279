"""Prompt groups of random tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Group = dict[str, NDArray[Any]]


def make_group(
    rng: np.random.Generator,
    prompt_tokens: int,
    response_tokens: Sequence[int],
    masked: float = 0.0,
) -> Group:
    """A group of random tokens; ``masked`` is the share of response tokens not trained."""
    total = sum(response_tokens)
    return {
        "prompt_ids": rng.integers(0, 64, prompt_tokens, dtype=np.int32),
        "response_ids": rng.integers(0, 64, total, dtype=np.int32),
        "response_offsets": np.cumsum([0, *response_tokens]).astype(np.int64),
        "loss_mask": rng.random(total) >= masked,
        "generation_logprobs": (-4 + rng.normal(0, 0.3, total)).astype(np.float32),
        "policy_logprobs": (-4 + rng.normal(0, 0.3, total)).astype(np.float32),
        "reference_logprobs": (-4 + rng.normal(0, 0.3, total)).astype(np.float32),
        "weight_versions": np.zeros(total, np.int32),
        "rewards": rng.random(len(response_tokens)).astype(np.float32),
    }


def make_step() -> tuple[list[Group], list[tuple[float, ...]]]:
    """Eight groups of uneven samples, some tokens masked, one sample without a valid token."""
    rng = np.random.default_rng(0)
    groups = [
        make_group(rng, int(rng.integers(1, 9)), rng.integers(1, 12, 4).tolist(), masked=0.2)
        for _ in range(8)
    ]
    offsets = groups[3]["response_offsets"]
    groups[3]["loss_mask"][offsets[1] : offsets[2]] = False
    advantages = [tuple(rng.normal(size=4).tolist()) for _ in groups]
    return groups, advantages
