"""Selects the environment variables for actors on other machines, and how these are sent.

Plain variables are part of Ray's runtime environment, which Ray shows and logs. Secrets are passed
as arguments of actors, which Ray does not log.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, cast

from offbeat.config.engine_plugin import known_engines
from offbeat.messages.redaction import is_secret_variable
from offbeat.telemetry.hub import all_trackers

_PREFIXES: Final = (
    "CUDA_",
    "DG_",
    "FI_",
    "FLASHINFER_",
    "GLOO_",
    "HF_",
    "NCCL_",
    "NVTE_",
    "PYTORCH_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "UCX_",
)
_NAMES: Final = (
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACE_HUB_CACHE",
    "LD_LIBRARY_PATH",  # libfabric and NCCL's network plugin are found through it
    "OMP_NUM_THREADS",
    "XDG_CACHE_HOME",
)
_OF_RAY: Final = ("CUDA_VISIBLE_DEVICES",)
"""Variables that Ray sets for each actor itself."""


@dataclass(frozen=True, slots=True)
class EnvironmentVariables:
    """Environment variables by transport: plain or secret."""

    plain: Mapping[str, str]
    secret: Mapping[str, str] = field(repr=False)


def pass_on_variables(
    environ: Mapping[str, str], recipe: Mapping[str, str]
) -> EnvironmentVariables:
    """Return the variables for actors of a joined cluster: the recipe's, and some of this process.

    Variables that a Ray job sets for all of its processes are left out, because Ray refuses
    duplicates.
    """
    of_trackers = (tracker.variable_prefixes for tracker in all_trackers().values())
    of_engines = (engines.variable_prefixes for engines in known_engines().values())
    prefixes = (*_PREFIXES, *chain.from_iterable((*of_trackers, *of_engines)))
    own = {
        name: value
        for name, value in environ.items()
        if (name.startswith(prefixes) or name in _NAMES) and name not in _OF_RAY
    }
    every = own | dict(recipe)
    secret = {name: value for name, value in every.items() if is_secret_variable(name)}
    of_job = _of_job(environ)
    plain = {name: value for name, value in every.items() if name not in {*secret, *of_job}}
    return EnvironmentVariables(plain, secret)


def _of_job(environ: Mapping[str, str]) -> set[str]:
    """Return the names that the Ray job around this process sets."""
    try:
        job = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    except ValueError:
        return set()
    found = cast("object", job)
    for key in ("runtime_env", "env_vars"):
        found = cast("dict[str, object]", found).get(key) if isinstance(found, dict) else None
    return set(cast("dict[str, object]", found)) if isinstance(found, dict) else set()
