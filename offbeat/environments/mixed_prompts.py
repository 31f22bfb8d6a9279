"""Prompts of several environments, in shares that follow from their weights."""

from collections.abc import Mapping
from itertools import accumulate

import msgspec

from offbeat.environments.permutation import permuted
from offbeat.environments.prompts import PromptSource
from offbeat.messages.groups import Prompt


class EnvironmentPrompts:
    """The prompts of one of several environments; each says which."""

    def __init__(self, name: str, source: PromptSource) -> None:
        self._name, self.source = name, source

    @property
    def rows(self) -> int:
        return self.source.rows

    def prompt(self, prompt_index: int) -> Prompt | None:
        prompt = self.source.prompt(prompt_index)
        return None if prompt is None else msgspec.structs.replace(prompt, environment=self._name)


class MixedPrompts:
    """Prompt source over several environments: a pure function of the seed and the prompt index.

    Every cycle of as many prompts as the weights add up to holds as many of each environment as its
    weight, in an order drawn from (seed, cycle). The n-th prompt of an environment in this order is
    prompt n of its own source, so that each row comes once in each of its epochs. The source is at
    its end where one of the environments is.
    """

    def __init__(
        self, sources: Mapping[str, PromptSource], weights: Mapping[str, int], seed: int
    ) -> None:
        self.sources = {name: EnvironmentPrompts(name, each) for name, each in sources.items()}
        self._weights, self._seed = dict(weights), seed
        self._ends = dict(zip(self._weights, accumulate(self._weights.values()), strict=True))
        self._cycle = sum(self._weights.values())

    @property
    def rows(self) -> int:
        """Return the rows of all environments together."""
        return sum(each.rows for each in self.sources.values())

    def prompt(self, prompt_index: int) -> Prompt | None:
        name, own_index = self.place(prompt_index)
        prompt = self.sources[name].prompt(own_index)
        return (
            None if prompt is None else msgspec.structs.replace(prompt, prompt_index=prompt_index)
        )

    def place(self, prompt_index: int) -> tuple[str, int]:
        """Return the environment of a prompt, and the prompt's index in that environment's source."""
        cycle, place = divmod(prompt_index, self._cycle)
        slot = permuted(place, self._cycle, self._seed, cycle)
        name = next(name for name, end in self._ends.items() if slot < end)
        weight = self._weights[name]
        return name, cycle * weight + slot - (self._ends[name] - weight)
