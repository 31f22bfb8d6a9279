"""Tasks on which both sides are measured: prompts, reward and size of a step, for TRL's trainer.

Runs in the peer's own environment, so nothing of offbeat is imported.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasets import Dataset

_ROWS: Final = Path(__file__).parents[2] / "examples" / "smollm2" / "addition.jsonl"
_OPERAND_END: Final = 20
_NUMBER: Final = re.compile(r"-?\d+")

Row = dict[str, Any]
Reward = Callable[..., list[float]]


@dataclass(frozen=True, slots=True)
class Task:
    """One task as TRL's trainer takes it."""

    rows: Sequence[Row]  # every prompt with its answer
    reward: Reward
    prompts_per_step: int
    samples_per_prompt: int

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def prompts(self, steps: int, seed: int) -> Dataset:
        """Draw prompts for so many steps, with replacement."""
        drawn = random.Random(seed).choices(self.rows, k=steps * self.prompts_per_step)
        return Dataset.from_list(drawn)


def exact_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Return 1 where the completion is the sum and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def last_number(completions: list[list[Row]], answer: list[str], **_: object) -> list[float]:
    """Return 1 where the last number of the message is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    found = [_NUMBER.findall(text) for text in texts]
    return [
        float(bool(numbers) and int(numbers[-1]) == int(right))
        for numbers, right in zip(found, answer, strict=True)
    ]


def characters() -> Task:
    """Return the task of ``recipes/quickstart.yaml``: a+b= in characters."""
    problems = itertools.product(range(_OPERAND_END), repeat=2)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in problems]
    return Task(rows, exact_answer, 16, 16)


def words() -> Task:
    """Return the task of ``recipes/smollm2-addition.yaml``: sums in words, by the chat template."""
    rows = [json.loads(line) for line in _ROWS.read_text().splitlines()]
    ask = "{}\n\nAnswer with the number only."
    return Task(
        [
            {
                "prompt": [{"role": "user", "content": ask.format(row["question"])}],
                "answer": row["answer"],
            }
            for row in rows
        ],
        last_number,
        8,
        8,
    )


TASKS: Final[dict[str, Callable[[], Task]]] = {"characters": characters, "words": words}
