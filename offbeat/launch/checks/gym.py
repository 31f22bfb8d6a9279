"""Check of a task of reasoning-gym: it is made, with the code that a run makes it with."""

from collections.abc import Iterator

import msgspec

from offbeat.config.run import RunConfig
from offbeat.environments.gym_tasks import GymOptions, GymUnusable, item_of
from offbeat.launch.checks.finding import Finding, error, ok


def check_gym(config: RunConfig) -> Iterator[Finding]:
    """Check that the task can be made, and its question filled in."""
    if config.environment.name != "reasoning_gym":
        return
    try:
        options = msgspec.convert(config.environment.options, GymOptions)
        item = item_of(options, {"seed": config.seed, "item": 0})
        question = options.question_of(item)
    except msgspec.ValidationError:
        return  # reported by the check of the prompts
    except GymUnusable as wrong:
        yield error("environment", str(wrong), "Fix environment.options, or install the package.")
        return
    yield ok("environment", f"the first question of {options.task}: {question!r:.200}")
