"""Builds the cases of the trainer benchmark.

Models with random weights, and prompt groups of random tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

Groups = list[dict[str, NDArray[Any]]]
Advantages = list[tuple[float, ...]]

_DRIFT: Final = (
    0.1  # nats by which a sampler's logprobs differ from the trainer's: some tokens clip
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the groups of one step. All prompts have one length, and all responses."""

    name: str
    model: str  # of MODELS
    groups: int
    samples: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all samples, as if no prompt were shared."""
        return self.groups * self.samples * (self.prompt_tokens + self.response_tokens)

    def __str__(self) -> str:
        lengths = f"{self.prompt_tokens}+{self.response_tokens} tokens"
        return f"{self.name}: {self.groups} groups of {self.samples} samples of {lengths}"


MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "toy": {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "60M": {
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
"""``tiny`` is the quickstart's: a step is almost all overhead. ``60M`` has a real vocabulary."""

TOY: Final = Case("toy", "toy", 3, 2, 4, 5)
SHORT: Final = Case("tiny, short", "tiny", 16, 16, 6, 3)
LONG: Final = Case("tiny, long", "tiny", 16, 16, 6, 64)
LARGE: Final = Case("60M", "60M", 2, 4, 32, 96)
CHUNKED: Final = Case("tiny, in chunks", "tiny", 64, 4, 6, 3)


def write_model(name: str, directory: Path) -> Path:
    """A Hugging Face directory of this model, with random weights; the same each time."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **MODELS[name],
        initializer_range=0.05,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_batch(case: Case) -> tuple[Groups, Advantages]:
    """Groups of random tokens without the sampler's logprobs, and advantages.

    The same each time.
    """
    rng, vocabulary = np.random.default_rng(0), MODELS[case.model]["vocab_size"]
    total = case.samples * case.response_tokens
    groups: Groups = [
        {
            "prompt_ids": rng.integers(0, vocabulary, case.prompt_tokens, dtype=np.int32),
            "response_ids": rng.integers(0, vocabulary, total, dtype=np.int32),
            "response_offsets": np.arange(0, total + 1, case.response_tokens, dtype=np.int64),
            "loss_mask": np.ones(total, np.bool_),
            "weight_versions": np.zeros(total, np.int32),
        }
        for _ in range(case.groups)
    ]
    return groups, [tuple(rng.normal(size=case.samples).tolist()) for _ in groups]


def sampled_with(groups: Groups, logprobs_SL: NDArray[np.float32]) -> Groups:
    """The groups, as if an engine had sampled them whose logprobs are a little off these."""
    rng = np.random.default_rng(1)
    drifted_SL = (logprobs_SL + rng.normal(0, _DRIFT, logprobs_SL.shape)).astype(np.float32)
    parts = np.split(drifted_SL.reshape(-1), len(groups))
    return [
        group | {"generation_logprobs": part} for group, part in zip(groups, parts, strict=True)
    ]
