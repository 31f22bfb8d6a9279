"""Prompt groups of random tokens with drawn lengths: work for a trainer without engines.

Legend: S samples, T tokens of all samples of a group.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import OffbeatError
from offbeat.transfer_queue.schema import GENERATION_LOGPROBS

FabricatedGroup = dict[str, NDArray[Any]]


class UnusableLengths(OffbeatError):
    """A length distribution that is invalid or does not fit the model.

    Fix: use a distribution such as ``mean=300,sigma=0.8,clip=1024``.
    """

    got: str
    want: str

    def __str__(self) -> str:
        return f"lengths: {self.got}, expected {self.want}, as in mean=300,sigma=0.8,clip=1024"


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """A lognormal distribution of response lengths. Every prompt has the same length."""

    mean: int = 256  # tokens of a response, before clipping
    sigma: float = 0.0  # of the logarithm; 0: all responses have one length
    clip: int = 1 << 20  # maximum tokens of a response
    prompt: int = 32  # tokens of a prompt

    @classmethod
    def parse(cls, text: str) -> "LengthLaw":
        """Parse a distribution such as ``mean=300,sigma=0.8,clip=1024,prompt=64``.

        Raises:
            UnusableLengths: A name is unknown, or a value is not a positive number.
        """
        values = dict[str, float]()
        names = {field.name: field.type for field in fields(cls)}
        for item in filter(None, text.replace(" ", "").split(",")):
            name, _, value = item.partition("=")
            if name not in names:
                raise UnusableLengths(f"{name!r}", f"one of {', '.join(names)}")
            try:
                values[name] = float(value) if name == "sigma" else int(value)
            except ValueError:
                raise UnusableLengths(f"{name}={value!r}", "a number") from None
            if not (name != "sigma") <= values[name] < math.inf:  # refuses NaN too
                raise UnusableLengths(f"{name}={value}", "a positive number")
        return cls(**values)  # pyright: ignore[reportArgumentType] -- each is of its field's type

    def check_fits(self, max_model_len: int) -> None:
        """Refuse a distribution if its longest sample exceeds the model's length.

        Raises:
            UnusableLengths: Prompt and clip together exceed ``max_model_len``.
        """
        longest = self.prompt + min(self.clip, self.mean if not self.sigma else self.clip)
        if longest > max_model_len:
            got = f"prompt={self.prompt} and clip={self.clip} are {longest} tokens"
            raise UnusableLengths(got, f"at most generator.max_model_len={max_model_len}")

    def draw(self, rng: np.random.Generator, samples: int) -> NDArray[np.int64]:
        """Draw the lengths [S] of the responses of one group, each at least one token."""
        center = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.exp(rng.normal(center, self.sigma, samples)).round().astype(np.int64)
        return drawn.clip(1, self.clip)


def fabricate(
    law: LengthLaw, groups: int, samples: int, vocabulary: int, seed: int
) -> list[FabricatedGroup]:
    """Return groups of random tokens without logprobs. Equal arguments give equal groups.

    Args:
        law: Distribution of the lengths. groups: Number of groups. samples: Samples of each group.
        vocabulary: Upper bound of the token ids, exclusive. seed: Seed of lengths and tokens.
    """
    rng = np.random.default_rng(seed)
    made = list[FabricatedGroup]()
    for _ in range(groups):
        lengths = law.draw(rng, samples)
        total = int(lengths.sum())
        made.append(
            {
                "prompt_ids": rng.integers(0, vocabulary, law.prompt, dtype=np.int32),
                "response_ids": rng.integers(0, vocabulary, total, dtype=np.int32),
                "response_offsets": np.concatenate([[0], lengths.cumsum()]).astype(np.int64),
                "loss_mask": np.ones(total, np.bool_),
                "weight_versions": np.zeros(total, np.int32),
                GENERATION_LOGPROBS: np.zeros(total, np.float32),
            }
        )
    return made


def count_tokens(group: Mapping[str, NDArray[Any]]) -> int:
    """Return the tokens of a group. The prompt counts once per sample."""
    samples = len(group["response_offsets"]) - 1
    return samples * len(group["prompt_ids"]) + len(group["response_ids"])
