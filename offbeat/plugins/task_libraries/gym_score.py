"""Computes the reward of an item of reasoning-gym. Only a reward child imports this module."""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnusedImport=false
# reasoning-gym is an extra, and unknown if it is not installed.

from collections.abc import Mapping
from typing import Any

import msgspec
import reasoning_gym  # noqa: F401 - at the start of the child, not within the deadline of a call

from offbeat.environments.final_answer import find_tagged_answer, without_thinking
from offbeat.plugins.task_libraries.gym_tasks import GymOptions, make_items


def gym_reward(prompt: Mapping[str, Any], response: str, **options: Any) -> float:  # noqa: ANN401
    """Return 1 if the library's score of the answer reaches the threshold, else 0.

    The answer is the last ``<answer>...</answer>`` outside of thinking blocks, else all text
    outside of them.
    """
    gym = msgspec.convert(options, GymOptions)
    said = without_thinking(response)
    tagged = find_tagged_answer(said)
    answer = (said if tagged is None else tagged).strip()
    items = make_items(gym, prompt["seed"])
    score = float(items.score_answer(answer, items[prompt["item"]]))
    return score if gym.threshold is None else float(score >= gym.threshold)
