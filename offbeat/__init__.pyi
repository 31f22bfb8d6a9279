from offbeat.config.loader import load_recipe
from offbeat.environments.agent_client import AgentClient
from offbeat.environments.protocol import (
    Environment,
    Episode,
    MultiTurn,
    Response,
    SingleTurn,
)
from offbeat.environments.unavailable import EnvironmentUnavailable
from offbeat.launch.launch import run_recipe
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.runs.past_run import read_events
from offbeat.sampler.policy import Sampler

__all__ = [
    "AgentClient",
    "Environment",
    "EnvironmentUnavailable",
    "Episode",
    "MultiTurn",
    "OffbeatError",
    "Prompt",
    "Response",
    "RolloutTask",
    "Sampler",
    "SingleTurn",
    "load_recipe",
    "read_events",
    "run_recipe",
]
__version__: str
