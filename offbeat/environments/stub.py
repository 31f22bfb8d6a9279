"""Environment of dry runs: no tokenizer, no text, rewards that rise slowly."""

import math
import random
from collections.abc import Sequence

import msgspec

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.media_prompts import media_prompts
from offbeat.environments.protocol import EncodedPrompt, SingleTurn
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask

_BYTES_PER_TOKEN = 4
_VERSIONS_TO_LEARN = 100.0  # weight versions after which 63 % is learned
_NOISE = 0.2


class StubEnvironment(SingleTurn):
    """Scores any prompt with seeded noise around a level that rises with the weight version."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        """``config``: section of the run; None: prompts have no media."""
        self._config = config

    def encode(self, prompt: Prompt) -> tuple[int, ...] | EncodedPrompt:
        """Return one token per four bytes of the row; the same row always gives the same tokens."""
        tokens = tuple(msgspec.json.encode(prompt.data)[::_BYTES_PER_TOKEN])
        if self._config is None or not self._config.has_media:
            return tokens
        return EncodedPrompt(tokens, media_prompts().stub_media(self._config, prompt.row))

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        noise = random.Random(f"{task.seed}:{task.prompt_index}")
        return [_level(spans[0][0]) + noise.gauss(0.0, _NOISE) for spans in result.version_spans]


def _level(version: int) -> float:
    return 1.0 - 0.9 * math.exp(-version / _VERSIONS_TO_LEARN)
