"""Content of fake prompt groups, generated from their seed: lengths, rewards, and poison."""

from typing import Final

import msgspec

from offbeat.config.run import RunConfig
from offbeat.messages.groups import Receipt, RolloutTask, VersionSpans
from offbeat.simulation.engine import FakeEngine

PROMPT_TOKENS: Final = 5
_COLUMNS: Final = ("response_ids", "rewards")
_TOKEN_BYTES: Final = 13
_MULTIPLIER: Final = 6364136223846793005
_MASK: Final = 2**64 - 1
_FUTURE: Final = 1000


class Content:
    """Generated samples of one group. The same task has the same content on every worker."""

    __slots__ = ("lengths", "longest", "rewards", "task")

    def __init__(self, task: RolloutTask, config: RunConfig) -> None:
        longest = config.generator.sampling.max_new_tokens
        filtered = config.filters.zero_variance
        dice = (task.seed ^ task.prompt_index) * _MULTIPLIER + 1442695040888963407 & _MASK
        flat = filtered and (dice >> 33) % 6 == 0
        lengths, rewards = list[int](), list[float]()
        for sample in range(task.samples):
            dice = dice * _MULTIPLIER + 1442695040888963407 & _MASK
            lengths.append(1 + (dice >> 40) % longest)
            # The first two differ, so that only a group meant to be flat is flat.
            won = bool(sample % 2) if sample < 2 else bool(dice >> 33 & 1)  # noqa: PLR2004
            rewards.append(1.0 if flat or won else 0.0)
        self.task, self.longest = task, longest
        self.lengths, self.rewards = tuple(lengths), tuple(rewards)


def receipt_of(content: Content, engine: FakeEngine, spans: tuple[VersionSpans, ...]) -> Receipt:
    """Return a correct receipt."""
    task, lengths, n = content.task, content.lengths, content.task.samples
    longest = content.longest
    return Receipt(
        task.prompt.prompt_index,
        task.attempt,
        engine.name,
        engine.incarnation,
        content.rewards,
        (PROMPT_TOKENS,) * n,
        lengths,
        lengths,
        tuple(["length" if length == longest else "stop" for length in lengths]),
        spans,
        _COLUMNS,
        _TOKEN_BYTES * sum(lengths),
        0.3,
        0.02,
        sampling=task.sampling,
    )


def poisoned(receipt: Receipt, kind: str) -> Receipt:
    """Return the receipt with one error."""
    first, *others = receipt.version_spans
    match kind:
        case "reward_nan":
            change = {"rewards": (float("nan"), *receipt.rewards[1:])}
        case "group_short":
            change = _every_column(receipt, slice(1, None))
        case "group_ragged":
            change = {"rewards": receipt.rewards[1:]}
        case "sample_doubled":
            change = _every_column(receipt, None)
        case "sample_empty":
            change = {
                "response_tokens": (0, *receipt.response_tokens[1:]),
                "valid_tokens": (0, *receipt.valid_tokens[1:]),
                "version_spans": ((), *others),
            }
        case "version_future":
            version, tokens = first[-1]
            change = {"version_spans": ((*first[:-1], (version + _FUTURE, tokens)), *others)}
        case "attempt_wrong":
            change = {"attempt": receipt.attempt + 1}
        case "spans_short":
            version, tokens = first[-1]
            change = {"version_spans": ((*first[:-1], (version, tokens + 1)), *others)}
        case _:
            raise ValueError(f"{kind} poisons no receipt")
    return msgspec.structs.replace(receipt, **change)


def _every_column(receipt: Receipt, part: slice | None) -> dict[str, tuple[object, ...]]:
    """Cut all columns alike; ``part`` None duplicates the last sample."""
    names = (
        "rewards",
        "prompt_tokens",
        "response_tokens",
        "valid_tokens",
        "finish_reasons",
        "version_spans",
    )
    columns: dict[str, tuple[object, ...]] = {name: getattr(receipt, name) for name in names}
    return {
        name: (*column, column[-1]) if part is None else column[part]
        for name, column in columns.items()
    }
