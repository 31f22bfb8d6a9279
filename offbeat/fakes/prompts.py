"""Prompts without content: tests, planning and the simulator share them."""

from dataclasses import dataclass

from offbeat.messages.groups import Prompt


@dataclass
class FakePrompts:
    """Prompts without content; endless unless ``count`` is given."""

    count: int | None = None

    def prompt(self, prompt_index: int) -> Prompt | None:
        if self.count is not None and prompt_index >= self.count:
            return None
        return Prompt(prompt_index, 0, prompt_index, {})
