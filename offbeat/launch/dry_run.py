"""Changes a recipe for a dry run: stubs instead of models, few steps, little data."""

from collections.abc import Mapping
from typing import Any, Final

from offbeat.config.base import Config
from offbeat.config.limits import on_failed_sample
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import StubGeneratorConfig
from offbeat.config.sections.rollout import RolloutConfig
from offbeat.config.sections.sync import ObjectStoreSyncConfig
from offbeat.config.sections.trainer import StubTrainerConfig
from offbeat.telemetry.hub import change_trackers
from offbeat.weight_sync.transport_plugin import find_transport_plugin

STEPS: Final = 10
ENGINES: Final = 4
TOKENS: Final = 64
NO_FILE: Final[Mapping[str, Any]] = {"path": None, "columns": {}}
_STUB_ENVIRONMENT: Final[Mapping[str, Any]] = {
    "name": "stub",
    "target": None,
    "command": (),
    "rewards": {},
    "options": {},
    "max_turns": 1,
    "variables": (),
    "renderer": {},
    "episodes_per_child": None,
    "episode_deadline_s": None,
    "workers": 1,
}


def dry(config: RunConfig) -> RunConfig:
    """Return the same run on stub backends, with the same controller, queue, sync and loggers.

    One stub trainer replaces all ranks. At most four stub engines replace the engines, or replace
    the file of demonstrations. Prompts and rewards are synthetic. The run loads no model and
    contacts no server.
    """
    values, transport = config.model_dump(), find_transport_plugin(config.sync)
    environments = {
        name: {
            "environment": each.environment.model_dump() | _STUB_ENVIRONMENT,
            "data": each.data.model_dump() | NO_FILE,
            "eval": each.eval.model_dump() | NO_FILE,
        }
        for name, each in config.environments.items()
    }
    changes: dict[str, dict[str, Any]] = {
        "environments": {
            name: values["environments"][name] | section for name, section in environments.items()
        },
        "environment": {} if config.environments else {**_STUB_ENVIRONMENT},
        "rollout": {
            "on_failed_sample": on_failed_sample(config),
            "max_sample_tokens": None,
            "max_branches": RolloutConfig().max_branches,
            "branches": RolloutConfig().branches,
            "reward_call_budget": None,
            "on_reward_budget_spent": RolloutConfig().on_reward_budget_spent,
        },
        "data": {**NO_FILE},
        "eval": {
            **NO_FILE,
            "sets": {name: each.model_dump() | NO_FILE for name, each in config.eval.sets.items()},
        },
        "generator": {
            "backend": "stub",
            "engines": min(max(config.generator.engines, 1), ENGINES),
            "cpus": 0.0,
            "gpus": 0.0,
            "sampling": {
                **config.generator.sampling.model_dump(),
                "max_new_tokens": min(config.generator.sampling.max_new_tokens, TOKENS),
            },
        },
        "trainer": {
            "backend": "stub",
            "cpus": 0.0,
            "gpus": 0.0,
        },
        "sync": {} if transport is None else {**transport.for_dry_run(config.sync)},
    }
    change_trackers(values, config, lambda tracker, section: tracker.for_dry_run(section))
    if config.runtime.backend == "local":
        values["sync"] = kept(values["sync"] | {"transport": "object_store"}, ObjectStoreSyncConfig)
    values["model"]["weights"] = None
    values["generator"] = kept(values["generator"], StubGeneratorConfig)
    values["trainer"] = kept(values["trainer"], StubTrainerConfig)
    return change_recipe(values, changes, steps=min(config.steps, STEPS), name=f"{config.name}-dry")


def kept(section: Mapping[str, Any], kind: type[Config]) -> dict[str, Any]:
    """Return those keys of a section that ``kind`` has, too."""
    return {name: value for name, value in section.items() if name in kind.model_fields}


def change_recipe(
    values: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], **others: object
) -> RunConfig:
    """Return the recipe of ``values`` with ``changes`` to sections and ``others`` at top level."""
    for section, change in changes.items():
        values[section] |= change
    return RunConfig.model_validate(values | others)
