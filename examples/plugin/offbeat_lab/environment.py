"""An environment: prompts from a file, and a reward for an answer that is right or almost right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat.interfaces import (
    Environment,
    EnvironmentConfig,
    EnvironmentTraits,
    GenerateResult,
    PluginOfEnvironments,
    Prompt,
    RolloutTask,
    SingleTurn,
    Tokenizer,
    content_ids,
    encode_prompt,
)


class Nearly(SingleTurn):
    """Reward 1.0 for the answer of the row, and ``close`` for a number next to it."""

    def __init__(self, tokenizer: Tokenizer, close: float = 0.0) -> None:
        """Keep the tokenizer of the model."""
        self._tokenizer, self._close = tokenizer, close

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        return encode_prompt(prompt, self._tokenizer)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        """Return a reward per sample."""
        answer = int(task.prompt.data["answer"])
        return [self._reward(self._tokenizer.decode(ids), answer) for ids in content_ids(result)]

    def _reward(self, response: str, answer: int) -> float:
        if not response.strip().isdecimal():
            return 0.0
        distance = abs(int(response) - answer)
        return 1.0 if distance == 0 else self._close if distance == 1 else 0.0


class NearlyPlugin(PluginOfEnvironments):
    """Brings ``environment.name: nearly``."""

    traits = EnvironmentTraits("a number that is right, or almost.")

    def make_environment(
        self, section: EnvironmentConfig, tokenizer: Tokenizer, working_dir: Path
    ) -> Environment:
        """Return the environment of one worker."""
        del working_dir
        return Nearly(tokenizer, **section.options)


NEARLY: Final = NearlyPlugin()
