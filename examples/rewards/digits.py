"""A reward function: how close a response comes to the answer of its row.

Use it with::

    environment:
      name: function
      target: digits:reward
    data:
      path: examples/rewards/sums.jsonl
"""

import re
from typing import Any


def reward(prompt: dict[str, Any], response: str, *, near: float = 0.1) -> float:
    """1.0 for the answer, ``near`` for any other number, 0.0 for a response without one."""
    number = re.search(r"\d+", response)
    if number is None:
        return 0.0
    return 1.0 if int(number.group()) == prompt["answer"] else near
