"""Correct receipts of groups that were not sampled, for tests, planning and the simulator.

Also provides prompts without content, for the same purposes.
"""

from dataclasses import dataclass
from typing import Any, Final

from offbeat.messages.groups import Prompt, Receipt, VersionSpans

INCARNATION: Final = "incarnation-1"
"""Incarnation of an engine that is never replaced."""


def make_receipt(
    prompt_index: int,
    attempt: int,
    version_spans: tuple[VersionSpans, ...],
    **facts: Any,  # noqa: ANN401 -- fields of a receipt
) -> Receipt:
    """Return a consistent receipt with one sample per entry of ``version_spans``.

    The spans determine how many tokens a sample has. All tokens are valid. Rewards alternate
    between 0 and 1, unless ``facts`` has other rewards.
    """
    n = len(version_spans)
    lengths = tuple([sum([tokens for _, tokens in spans]) for spans in version_spans])
    usual: dict[str, Any] = {
        "engine": "generator-0",
        "engine_incarnation": INCARNATION,
        "rewards": (0.0, 1.0) * (n // 2) + (0.0,) * (n % 2),
        "prompt_tokens": (3,) * n,
        "response_tokens": lengths,
        "valid_tokens": lengths,
        "finish_reasons": ("stop",) * n,
        "columns": ("response_ids",),
        "payload_bytes": 100,
    }
    return Receipt(prompt_index, attempt, version_spans=version_spans, **(usual | facts))


@dataclass
class FakePrompts:
    """Prompts without content, endless unless ``count`` is set."""

    count: int | None = None

    def prompt(self, prompt_index: int) -> Prompt | None:
        if self.count is not None and prompt_index >= self.count:
            return None
        return Prompt(prompt_index, 0, prompt_index, {})
