"""Computes one short name of everything a group's tokens depend on besides the weights."""

import hashlib
import json
from typing import Final

from offbeat.config.mixture import environment_views
from offbeat.config.run import RunConfig

_LEFT_OUT_IF_OFF: Final[dict[str, object]] = {"top_k": 0, "min_p": 0.0, "stop": []}
"""Sampling keys that are no part of the name at these values. A stored group whose settings lack the
key was sampled so, and may still be trained."""


def sampling_identity(config: RunConfig) -> str:
    """Return a name that differs wherever groups are sampled under other settings.

    A stored group may be trained only under the settings it was sampled under: the trainer computes
    the probabilities of its tokens at the present temperature, and compares them with those that the
    engine recorded. With other limits the samples are of another distribution. What else a group is
    made of (model, data, environment, seed) a resumed run cannot change.
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
        "kv": None,  # in the name since the first runs
        **generator.sampling_settings,
    }
    content = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=6).hexdigest()
