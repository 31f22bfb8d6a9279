"""Finds options by name, so that the core imports none of them.

An option registers here as a module. The core asks for it through a function in the room that uses
it: the function returns the option under a protocol of that room.

media    pictures in prompts: arrays that a prompt carries next to its tokens
local    runtime that executes a run in one process, without Ray
"""

from importlib import import_module
from typing import Any, Final

_MODULES: Final = {"media": "offbeat.images.plugin", "local": "offbeat.local.run"}


def find_option(name: str) -> Any:  # noqa: ANN401 -- each caller casts it to a protocol of its room
    """Return the module that an option registers under this name."""
    return import_module(_MODULES[name])
