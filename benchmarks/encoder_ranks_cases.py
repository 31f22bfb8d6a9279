"""Layouts, models and steps of the benchmark of encoder ranks. Numpy only."""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from offbeat.plugins.images.pictures import MediaKind, Pictures

PLACEHOLDER: Final = 60  # token id
_OPEN, _CLOSE, _LEAST, _MOST = 61, 62, 2, 50  # ids around a picture, and those of text
_FLOAT: Final = 4  # bytes of a feature, and of its gradient
PATCH: Final = 8  # pixels of a side
MERGE: Final = 2  # patches of a side that become one token


@dataclass(frozen=True)
class Layout:
    """Ranks of both sides."""

    name: str
    backend: Literal["torch", "megatron"]
    lanes: int = 1
    tensor: int = 1
    encoder_tensor: int = 1

    @property
    def ranks(self) -> int:
        """Return the ranks of the world, which has one encoder."""
        return self.lanes * self.tensor + self.encoder_tensor


@dataclass(frozen=True)
class Size:
    """An image-text model and the step that it trains: groups with one picture each, all different."""

    name: str
    hidden: int
    layers: int
    tower_hidden: int
    tower_layers: int
    pixels: int  # of a picture's side
    vocabulary: int
    groups: int
    samples: int  # of a group
    response: int  # tokens of a sample
    text: int  # tokens of a prompt behind its picture
    memory_groups: int = 16  # of the chunk whose memory is measured

    @property
    def picture_tokens(self) -> int:
        """Return the tokens of one picture."""
        return (self.pixels // (PATCH * MERGE)) ** 2


@dataclass(frozen=True)
class StepSeen:
    """What a rank saw of a step."""

    wall_s: float
    inside_s: float  # send and receive of the bridge
    waited_s: float  # for the other side, before its messages
    received_bytes: int  # by all ranks


@dataclass(frozen=True)
class Step:
    """Groups with their advantages."""

    groups: list[dict[str, Any]]
    advantages: list[tuple[float, ...]]


LAYOUTS: Final = {
    each.name: each
    for each in (
        Layout("torch 1 + 1", "torch"),
        Layout("torch 2 + 1", "torch", lanes=2),
        Layout("torch tp2 + tp2", "torch", tensor=2, encoder_tensor=2),
        Layout("megatron 1 + 1", "megatron"),
        Layout("megatron tp2 + 1", "megatron", tensor=2),
    )
}
TINY: Final = Size("tiny", 32, 2, 32, 2, 32, 64, groups=8, samples=4, response=8, text=4)
LARGER: Final = Size("larger", 256, 4, 256, 4, 128, 4096, groups=8, samples=4, response=16, text=16)
SIZES: Final = {each.name: each for each in (TINY, LARGER)}


def make_step(size: Size, groups: int) -> Step:
    """Return so many random groups, each with a picture of its own."""
    rng = np.random.default_rng(0)
    made = [_group(rng, size) for _ in range(groups)]
    return Step(made, [tuple(rng.normal(0, 1, size.samples).tolist()) for _ in made])


def _group(rng: np.random.Generator, size: Size) -> dict[str, Any]:
    total = size.samples * size.response
    text = rng.integers(_LEAST, _MOST, size.text).tolist()
    prompt = [1, _OPEN, *[PLACEHOLDER] * size.picture_tokens, _CLOSE, *text]
    sides = [[3, size.pixels, size.pixels]]
    values = rng.standard_normal(int(np.prod(sides)), np.float32)
    media = Pictures(MediaKind.PIXELS, values, np.array(sides, np.int32)).media
    return {
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": rng.integers(_LEAST, _MOST, total, dtype=np.int32),
        "response_offsets": np.arange(size.samples + 1, dtype=np.int64) * size.response,
        "loss_mask": np.ones(total, np.bool_),
        "weight_versions": np.zeros(total, np.int32),
        "rewards": rng.random(size.samples).astype(np.float32),
        "generation_logprobs": rng.normal(-4, 0.3, total).astype(np.float32),
        **media,
    }


def activation_bytes(size: Size) -> int:
    """Return the bytes of a step's features and of their gradients, in float32, each counted once.

    Every placeholder of a prompt takes one feature of the language model's width. Every group belongs
    to one lane, and no two have a picture in common.
    """
    groups = make_step(size, size.groups).groups
    features = sum(int(np.sum(group["prompt_ids"] == PLACEHOLDER)) for group in groups)
    return 2 * features * size.hidden * _FLOAT
