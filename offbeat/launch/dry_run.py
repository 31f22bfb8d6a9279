"""Changes a recipe for a dry run: stubs instead of models, few steps, little data."""

from typing import Any, Final

from offbeat.config.run import RunConfig

STEPS: Final = 10
ENGINES: Final = 4
TOKENS: Final = 64


def dry(config: RunConfig) -> RunConfig:
    """Return the same run on stub backends: same controller, queue, sync, loggers.

    One stub trainer replaces all ranks, and at most four stub engines the fleet; prompts and
    rewards are synthetic; no model is loaded and no server is contacted.
    """
    changes: dict[str, dict[str, Any]] = {
        "environment": {
            "name": "stub",
            "target": None,
            "options": {},
            "max_turns": 1,
            "workers": 1,
        },
        "data": {"path": None},
        "eval": {"path": None},
        "generator": {
            "backend": "stub",
            "device": "cpu",
            "engines": min(config.generator.engines, ENGINES),
            "cpus": 0.0,
            "gpus": 0.0,
            "sampling": {
                **config.generator.sampling.model_dump(),
                "max_new_tokens": min(config.generator.sampling.max_new_tokens, TOKENS),
            },
        },
        "trainer": {
            "backend": "stub",
            "device": "cpu",
            "cpus": 0.0,
            "gpus": 0.0,
            **{f"{axis}_parallel": 1 for axis in ("data", "tensor", "pipeline", "expert")},
        },
        "wandb": {"mode": "disabled" if config.wandb.mode == "disabled" else "offline"},
    }
    values = config.model_dump()
    for section, change in changes.items():
        values[section] |= change
    values["steps"] = min(config.steps, STEPS)
    values["name"] = f"{config.name}-dry"
    return RunConfig.model_validate(values)
