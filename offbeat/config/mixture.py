"""The environments of a run: one without a name, or several by name.

Code for one environment reads a *view*: the config of a run with only that environment. So the code
need not know whether other environments exist.

Also computes one short name for everything, except the weights, that a group's tokens depend on.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.config.sections.eval import EvalSetConfig

SECTION: Final = "environments"

_OWN_KEYS: Final = re.compile(r"(?<![\w.])(?=environment\.|data\.|eval\.(?:path|columns))")
"""Matches the beginning of a key that each of several environments sets separately."""


def environment_views(config: RunConfig) -> dict[str, RunConfig]:
    """Return the view of each environment by name. A single environment has an empty name."""
    if not config.environments:
        return {"": config}
    workers = max(each.environment.workers for each in config.environments.values())
    views = dict[str, RunConfig]()
    for name, each in config.environments.items():
        one = each.eval
        scored = {
            "path": one.path,
            "columns": one.columns,
            "prompts": one.prompts or config.eval.prompts,
            "samples": one.samples or config.eval.samples,
            "sets": {},
        }
        section: dict[str, object] = {
            # Every worker plays all environments
            "environment": each.environment.model_copy(update={"workers": workers}),
            "data": each.data,
            "eval": config.eval.model_copy(update=scored),
            "environments": {},
        }
        views[name] = config.model_copy(update=section)
    return views


def environment_weights(config: RunConfig) -> dict[str, int]:
    """Return the weights of several environments by name, without a common divisor."""
    weights = {name: each.weight for name, each in config.environments.items()}
    divisor = math.gcd(*weights.values())
    return {name: weight // divisor for name, weight in weights.items()}


def key_in(name: str, key: str) -> str:
    """Return the key of the recipe for a key of the view called ``name``."""
    return f"{SECTION}.{name}.{key}" if name else key


def text_in(name: str, text: str) -> str:
    """Return a message about the view called ``name``, with the recipe's keys for the view's."""
    return _OWN_KEYS.sub(key_in(name, ""), text) if name else text


def inputs_in(name: str, inputs: Mapping[str, str]) -> Mapping[str, str]:
    """Return the recorded inputs of a run, with the keys of the view called ``name``.

    Inputs of no environment, such as paths on the hub, keep their keys. Inputs of other
    environments are left out.
    """
    if not name:
        return inputs
    prefix = key_in(name, "")
    return {
        key.removeprefix(prefix): value
        for key, value in inputs.items()
        if key.startswith(prefix) or not key.startswith(f"{SECTION}.")
    }


def evaluation_sets(config: RunConfig) -> dict[str, EvalSetConfig]:
    """Return the evaluation sets by name, with prompts and samples filled in.

    Each of several environments has a set under its name.
    """
    views = environment_views(config)
    return {
        set_name or name: one
        for name, view in views.items()
        for set_name, one in view.eval.named_sets.items()
    }


def prompt_paths(config: RunConfig) -> dict[str, str]:
    """Return all paths of prompt files by key, including evaluations."""
    return {
        key_in(name, key): path
        for name, view in environment_views(config).items()
        for key, path in {"data.path": view.data.path, **view.eval.paths}.items()
        if path is not None
    }


def evaluation_paths(config: RunConfig) -> dict[str, str]:
    """Return the paths of the prompt files of evaluations by key."""
    return {
        key_in(name, key): path
        for name, view in environment_views(config).items()
        for key, path in view.eval.paths.items()
    }


def environment_workers(config: RunConfig) -> int:
    """Return the number of environment workers: the maximum over the environments."""
    return max(view.environment.workers for view in environment_views(config).values())


def has_media(config: RunConfig) -> bool:
    """Return whether prompts of any environment may have media."""
    return any(view.environment.has_media for view in environment_views(config).values())


_LEFT_OUT_IF_OFF: Final[dict[str, object]] = {"top_k": 0, "min_p": 0.0, "stop": []}
"""Sampling keys that the name omits at these values. A stored group whose settings lack the key was
sampled with this value, and may still be trained.
"""


def sampling_identity(config: RunConfig) -> str:
    """Return a name that differs whenever the settings of sampling differ.

    A stored group may be trained only under the settings it was sampled under. The trainer computes
    the probabilities of its tokens at the present temperature, and compares them with the engine's
    recorded probabilities. Other limits change the distribution of samples. A resumed run cannot
    change the other inputs of a group: model, data, environment and seed.
    """
    generator = config.generator
    views = environment_views(config)
    turns = {name: view.environment.max_turns for name, view in views.items()}
    sampling = generator.sampling.model_dump(mode="json")
    settings = {
        "sampling": {
            name: value
            for name, value in sampling.items()
            if name not in _LEFT_OUT_IF_OFF or value != _LEFT_OUT_IF_OFF[name]
        },
        "max_model_len": generator.max_model_len,
        "max_turns": turns.get("", turns),
        "max_sample_tokens": config.rollout.max_sample_tokens,
        "max_branches": config.rollout.max_branches,
        "branches": config.rollout.branches,
        "kv": None,  # part of the name since the first runs
        **generator.sampling_settings,
    }
    content = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=6).hexdigest()
