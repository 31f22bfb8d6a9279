"""A program that names a reward in itself, and starts its run without a guard."""

from typing import Any

import offbeat


def reward(prompt: dict[str, Any], response: str) -> float:
    return 1.0


offbeat.run_recipe("none.yaml", ["environment.target=starts_a_run:reward"])
