"""The reward: a number for each response."""

import re
from typing import Any


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 if the first number of the response is the answer of its row, else 0.0."""
    number = re.search(r"\d+", response)
    return 1.0 if number is not None and int(number.group()) == prompt["answer"] else 0.0
