from offbeat.config.loader import load_recipe
from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.protocol import (
    Environment,
    EnvironmentUnavailable,
    Episode,
    MultiTurn,
    Response,
    SingleTurn,
)
from offbeat.launch.launch import run_recipe
from offbeat.launch.program import preview, resume, start, train
from offbeat.launch.run import Run, RunInterrupted, RunRefused, TrainingFailed, open_run
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
    "Run",
    "RunInterrupted",
    "RunRefused",
    "Sampler",
    "SingleTurn",
    "TrainingFailed",
    "load_recipe",
    "open_run",
    "preview",
    "read_events",
    "resume",
    "run_recipe",
    "start",
    "train",
]
__version__: str
