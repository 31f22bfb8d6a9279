"""Reads the recipe of a recorded run with overrides, and refuses overrides that change the data."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from offbeat.config.by_value import is_by_value
from offbeat.config.limits import trainer_resources
from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.yaml_text import to_yaml
from offbeat.environments.inputs import ADVANTAGE, LOSS
from offbeat.launch.process_environment import set_environment
from offbeat.plugins.retrain.errors import CannotRetrain
from offbeat.runs.directory import CONFIG, leaves
from offbeat.runs.inputs import targets
from offbeat.runs.past_run import find_journal

_TRUNCATED: Final = "rollout.truncated_samples"
_ALLOWED: Final = ("algorithm", "trainer", "steps")
"""Sections and keys that the trainer reads, in addition to ``_TRUNCATED``."""

_GROUPS: Final = "the groups of each step are recorded"
_SAMPLES: Final = "the samples are recorded"
_REASONS: Final[Mapping[str, str]] = {
    "environment": "prompts and rewards are recorded",
    "environments": "prompts and rewards are recorded",
    "data": "prompts and rewards are recorded",
    "rollout": "prompts and rewards are recorded",
    "generator": _SAMPLES,
    "seed": "it chooses prompts, samples and minibatches, which are recorded",
    "sampler": _GROUPS,
    "filters": _GROUPS,
    "buffer": _GROUPS,
    "groups_per_step": _GROUPS,
    "samples_per_group": _GROUPS,
    "model": "checkpoints and recorded log-probabilities belong to the model of the run",
}
"""Reason to refuse an override, by its first part."""
_FIX: Final = (
    f"Leave it out: only {', '.join(f'{name}' for name in _ALLOWED)} and {_TRUNCATED}=mask_loss "
    "change a retrained step. For other data, start another run"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The recipe to retrain with, and how it differs from the recipe of the run."""

    config: RunConfig
    overrides: Sequence[str]
    changed: frozenset[str]
    """Keys with a different value than in the run. Empty: the record has to be reproduced."""

    @property
    def reproduces(self) -> bool:
        """Return whether the retrained steps have to equal the recorded steps."""
        return not self.changed

    @property
    def masks_truncated(self) -> bool:
        """Return whether truncated samples lose their trained tokens, unlike in the run."""
        return _TRUNCATED in self.changed


def read_settings(run_dir: Path, overrides: Sequence[str]) -> Settings:
    """Read the recipe of a run, and the same recipe with overrides.

    Raises:
        NotARun: The directory holds no run.
        ConfigError: The recipe or an override cannot be read.
        CannotRetrain: An override would change the data, or the run's trainer is not supported.
        OSError: A file cannot be read.
    """
    find_journal(run_dir)  # first, because its error explains why a directory is not a run
    was = load_recipe(run_dir / CONFIG, []).config
    config = load_recipe(run_dir / CONFIG, overrides).config if overrides else was
    before, after = _values(was), _values(config)
    changed = frozenset(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    for key in sorted(changed):
        _check_key(key, after.get(key))
    check_trainer(run_dir, was)
    check_trainer(run_dir, config)
    set_environment(config.runtime.env)  # before transformers is imported
    return Settings(config, tuple(overrides), changed)


def _values(config: RunConfig) -> dict[str, Any]:
    return dict(leaves(yaml.safe_load(to_yaml(config, os.environ))))


def _check_key(key: str, value: object) -> None:
    """Refuse an override that the trainer does not read."""
    first = key.partition(".")[0]
    if first in _ALLOWED:
        return
    if key == _TRUNCATED:
        if value == "mask_loss":
            return
        problem = "the truncated samples are recorded without trained tokens"
        raise CannotRetrain(key, problem, "Leave it out")
    raise CannotRetrain(key, _REASONS.get(first, "no trainer reads it"), _FIX)


def check_trainer(run_dir: Path, config: RunConfig) -> None:
    """Check that the trainer computes with torch in one process, and that files have its code.

    Raises:
        CannotRetrain: It does not.
    """
    run, backend = str(run_dir), config.trainer.backend
    fix = "Name a run of the torch trainer with one rank"
    if backend == "stub":
        raise CannotRetrain(run, "it is a dry run, whose trainer computes nothing", fix)
    if backend != "torch":
        raise CannotRetrain(run, f"trainer.backend={backend} is not supported", fix)
    if (ranks := len(trainer_resources(config))) > 1:
        raise CannotRetrain(run, f"its trainer has {ranks} ranks, but one is supported", fix)
    named = targets(config)
    for key in (LOSS, ADVANTAGE):
        if is_by_value(target := named.get(key, "")):
            problem = f"{key}={target} was passed by value, so no file has it"
            fix = f"Put the function into a module, and add {key}=module:name"
            raise CannotRetrain(run, problem, fix)
