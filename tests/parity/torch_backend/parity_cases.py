"""What tests ask of a world, and what they are told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.training import LossSpec, StepResult

Arrays = dict[str, NDArray[Any]]
SIZES: dict[str, Any] = {
    "vocab_size": 63,  # odd, so that no number of ranks divides it
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
TOKENS = LossSpec(old_logprobs="policy", tis_cap=2.0, kl_coef=0.1, clip_low=0.4, clip_high=0.6)
SEQUENCES = LossSpec(normalize="sequences", temperature=0.7)
LOSSES = {"tokens": TOKENS, "sequences": SEQUENCES}


@dataclass(frozen=True)
class Step:
    """Groups with their advantages."""

    groups: list[dict[str, Any]]
    advantages: list[tuple[float, ...]]


@dataclass(frozen=True)
class Cut:
    """How a step is laid out."""

    shared_prompt: bool = True
    max_tokens: int = 150
    dtype: str = "float64"
    # A large eps makes a step proportional to its gradient: errors stay as large as they are.
    optimizer: dict[str, Any] = field(
        default_factory=lambda: {"learning_rate": 1e-2, "eps": 1.0, "max_grad_norm": None}
    )


@dataclass(frozen=True)
class Outcome:
    """What a step did, on one rank."""

    result: StepResult
    gradients: dict[int, Arrays]  # by number of chunks: raw sums, whole
    weights: Arrays
    digest: str


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


def worst_relative_error(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """Largest difference of any tensor, over that tensor's largest value."""
    assert got.keys() == want.keys()
    return max(float(np.abs(got[n] - want[n]).max() / np.abs(want[n]).max()) for n in want)


def moved(after: Arrays, before: Arrays) -> Arrays:
    return {name: after[name] - before[name] for name in before}


def chunked(count: int, chunks: int) -> Sequence[Any]:
    """Indices in so many parts, uneven where they must be; some may be empty."""
    return [part.tolist() for part in np.array_split(np.arange(count), chunks)]
