"""Environment of dry runs: no tokenizer, no text, rewards that rise slowly."""

import math
import random
from collections.abc import Sequence

import msgspec
import numpy as np

from offbeat.config.sections.images import ImagesConfig
from offbeat.environments.protocol import EncodedPrompt, SingleTurn
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.messages.media import Media, MediaKind

_BYTES_PER_TOKEN = 4
_VERSIONS_TO_LEARN = 100.0  # weight versions after which 63 % is learned
_NOISE = 0.2
_PICTURE = (3, 32, 32)
_SIZES_BYTES = 16  # of one picture: three sides and the kind


class StubEnvironment(SingleTurn):
    """Scores any prompt with seeded noise around a level that rises with the weight version."""

    def __init__(self, images: ImagesConfig | None = None) -> None:
        """``images`` are the limits of the run's pictures; None: its prompts have none."""
        self._images = images

    def encode(self, prompt: Prompt) -> tuple[int, ...] | EncodedPrompt:
        """Return one token per four bytes of the row; the same row always gives the same tokens.

        With pictures it is the same for their values: one picture of 3 x 32 x 32, or of one value
        where the run has no room for it.
        """
        tokens = tuple(msgspec.json.encode(prompt.data)[::_BYTES_PER_TOKEN])
        if self._images is None:
            return tokens
        fits = self._images.max_mib * 2**20 >= math.prod(_PICTURE) * 4 + _SIZES_BYTES
        size = _PICTURE if fits else (1, 1, 1)
        noise = np.random.default_rng(prompt.row)
        values = noise.standard_normal(math.prod(size), np.float32)
        media = Media(MediaKind.PIXELS, values, np.array([size], np.int32))
        return EncodedPrompt(tokens, media)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        noise = random.Random(f"{task.seed}:{task.prompt_index}")
        return [_level(spans[0][0]) + noise.gauss(0.0, _NOISE) for spans in result.version_spans]


def _level(version: int) -> float:
    return 1.0 - 0.9 * math.exp(-version / _VERSIONS_TO_LEARN)
