"""Environments of this folder that need no model file: addition, and the stub for dry runs.

Both are trusted code and run in the worker's process.
"""

import math
import random
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.media_prompts import find_media
from offbeat.environments.protocol import EncodedPrompt, SingleTurn
from offbeat.environments.text import Tokenizer, content_ids, encode_prompt
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask

_BYTES_PER_TOKEN = 4
_VERSIONS_TO_LEARN = 100.0  # weight versions after which 63 % is learned
_NOISE = 0.2


class StubEnvironment(SingleTurn):
    """Scores any prompt with seeded noise around a level that rises with the weight version."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        """``config`` is the section of the run. If None, prompts have no media."""
        self._config = config

    def encode(self, prompt: Prompt) -> tuple[int, ...] | EncodedPrompt:
        """Return one token per four bytes of the row. Equal rows give equal tokens."""
        tokens = tuple(msgspec.json.encode(prompt.data)[::_BYTES_PER_TOKEN])
        if self._config is None or not self._config.has_media:
            return tokens
        return EncodedPrompt(tokens, find_media().stub_media(self._config, prompt.row))

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        noise = random.Random(f"{task.seed}:{task.prompt_index}")
        return [_level(spans[0][0]) + noise.gauss(0.0, _NOISE) for spans in result.version_spans]


def _level(version: int) -> float:
    return 1.0 - 0.9 * math.exp(-version / _VERSIONS_TO_LEARN)


_DIGITS = "0123456789"
_NO_SUM = "?"  # for texts that no sum contains
_BY_NEIGHBOURS = " "  # for tokens whose text depends on adjacent tokens; no digit contains it


class Arithmetic(SingleTurn):
    """Reward 1.0 if the response, up to its stop token, is exactly ``answer``, else 0.0."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._surfaces = _Surfaces(tokenizer)
        self._encode = lru_cache(maxsize=1 << 16)(tokenizer.encode)
        self._text = lru_cache(maxsize=1 << 10)(self._read)  # many samples have the same text

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        if "messages" in prompt.data:
            return encode_prompt(prompt, self._tokenizer)
        return tuple(self._encode(prompt.data["prompt"]))

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        answer, text = str(task.prompt.data["answer"]), self._text
        return [1.0 if text(ids) == answer else 0.0 for ids in map(tuple, content_ids(result))]

    def answers(self, result: GenerateResult) -> Sequence[str]:
        return list(map(self._text, map(tuple, content_ids(result))))

    def _read(self, token_ids: tuple[int, ...]) -> str:
        """Return the response's text. If it cannot be a sum, return a text that equals no sum."""
        text = "".join(map(self._surfaces.__getitem__, token_ids))
        if _BY_NEIGHBOURS not in text:
            return text
        if _NO_SUM not in text:
            return self._tokenizer.decode(list(token_ids))
        return text.replace(_BY_NEIGHBOURS, _NO_SUM)


class _Surfaces(dict[int, str]):
    """Text that each token adds to digits, so that scoring needs no tokenizer.

    The value is ``_BY_NEIGHBOURS`` for space markers, byte tokens and empty texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        super().__init__((i, _surface(tokenizer, i, token)) for i, token in enumerate(tokens))

    def __missing__(self, token_id: int) -> str:
        """Return ``_NO_SUM`` for an id that the tokenizer lacks. The model may sample one."""
        return _NO_SUM


def _surface(tokenizer: Tokenizer, token_id: int, token: str) -> str:
    if token and not token.strip(_DIGITS):
        return token
    is_no_sum = tokenizer.decode([token_id]).strip().strip(_DIGITS)
    return _NO_SUM if is_no_sum else _BY_NEIGHBOURS
