"""Asynchronous reinforcement learning for language models: one controller, nothing lost, nothing stale.

``__all__`` has the names that a program needs. Each is imported at its first use, so importing this
package loads nothing else. ``ARCHITECTURE.md`` is the map of the code.
"""

from typing import Final

from offbeat.public_names import import_on_use

__version__ = "0.1.0"

_MODULES: Final = {
    "AgentClient": "offbeat.environments.environment_plugin",
    "Environment": "offbeat.environments.protocol",
    "EnvironmentUnavailable": "offbeat.environments.protocol",
    "Episode": "offbeat.environments.protocol",
    "MultiTurn": "offbeat.environments.protocol",
    "OffbeatError": "offbeat.messages.failures",
    "Prompt": "offbeat.messages.groups",
    "Response": "offbeat.environments.protocol",
    "RolloutTask": "offbeat.messages.groups",
    "Run": "offbeat.launch.run",
    "RunInterrupted": "offbeat.launch.run",
    "RunRefused": "offbeat.launch.run",
    "Sampler": "offbeat.sampler.policy",
    "SingleTurn": "offbeat.environments.protocol",
    "TrainingFailed": "offbeat.launch.run",
    "load_recipe": "offbeat.config.loader",
    "open_run": "offbeat.launch.run",
    "preview": "offbeat.launch.program",
    "read_events": "offbeat.runs.past_run",
    "resume": "offbeat.launch.program",
    "run_recipe": "offbeat.launch.launch",
    "start": "offbeat.launch.program",
    "train": "offbeat.launch.program",
}
"""The module of each public name. ``__init__.pyi`` declares them to type checkers."""

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll] -- the stub lists them

__getattr__, __dir__ = import_on_use(__name__, _MODULES)
