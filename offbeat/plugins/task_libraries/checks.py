"""Checks task libraries by building an environment of verifiers or reasoning-gym once."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from offbeat.config.run import RunConfig
from offbeat.environments.prompt_files import PromptFileError
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.task_libraries.gym_tasks import GymOptions, GymUnusable, find_item
from offbeat.plugins.task_libraries.verifiers_options import VerifiersOptions
from offbeat.plugins.task_libraries.verifiers_tasks import TasksRequest, read_tasks


def check_gym(config: RunConfig) -> Iterator[Finding]:
    """Check that the task can be created, and its question filled in."""
    try:
        options = msgspec.convert(config.environment.options, GymOptions)
        item = find_item(options, {"seed": config.seed, "item": 0})
        question = options.get_question(item)
    except msgspec.ValidationError:
        return  # the check of the prompts reports it
    except GymUnusable as wrong:
        yield error("environment", str(wrong), "Fix environment.options, or install the package.")
        return
    yield ok("environment", f"the first question of {options.task}: {question!r:.200}")


_SUBJECT: Final = "verifiers"
_GENERIC: Final = "DefaultRenderer"
"""Renderer of the library for unknown models."""


def check_verifiers(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Create the environment and its renderer in a separate process, and name the renderer."""
    try:
        options = msgspec.convert(config.environment.options, VerifiersOptions)
    except msgspec.ValidationError:
        return  # the check of the prompts reports it
    one = msgspec.structs.replace(options, tasks=1)
    tokenizer = str((working_dir / config.model.path).absolute())
    renderer = dict(config.environment.renderer)
    request = TasksRequest(one, str(working_dir.absolute()), tokenizer, renderer)
    try:
        with TemporaryDirectory(prefix="offbeat-check-") as folder:
            report = read_tasks(
                request, Path(folder) / "tasks.jsonl", config.environment.reward_start_s
            )
    except PromptFileError as wrong:
        yield error(
            _SUBJECT,
            str(wrong),
            "Fix environment.options or environment.renderer, or install what the taskset needs.",
        )
        return
    if report.renderer == _GENERIC:
        yield warning(
            _SUBJECT,
            f"renderers knows no model by the name {config.model.path}: its {_GENERIC} takes no tools "
            "and renders each turn again, as a branch if the tokens differ",
            "Name the model's own in environment.renderer, as in {name: qwen3}.",
        )
        return
    yield ok(_SUBJECT, f"messages are rendered by {report.renderer}")
