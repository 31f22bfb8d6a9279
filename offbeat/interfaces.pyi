from offbeat.config.base import Config
from offbeat.config.engine_plugin import EnginePlugin
from offbeat.config.environment_traits import EnvironmentTraits
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.config.sections.generator import PluginGeneratorConfig
from offbeat.doors import PluginUnusable
from offbeat.environments.environment_plugin import PluginOfAgents, PluginOfEnvironments
from offbeat.environments.prompts import PromptSource
from offbeat.environments.protocol import (
    EncodedPrompt,
    Environment,
    Episode,
    MultiTurn,
    Response,
    SingleTurn,
)
from offbeat.environments.reward_value import NamedRewards
from offbeat.environments.text import Tokenizer, content_ids, encode_prompt
from offbeat.generators.end_tokens import end_ids_of
from offbeat.generators.engine_loop import EngineLoop, SteppedEngine
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.module_server import ModuleEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import EngineUnavailable, FixableError, InvalidRequest, OffbeatError
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.messages.weights import CanaryAnswer, WeightRelease
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import (
    Admission,
    OutstandingGroup,
    Sampler,
    View,
    past_bound,
    past_bound_in_flight,
)
from offbeat.sampler.ready_first import ReadyFirst, WeightFifo
from offbeat.sampler.windowed import Windowed
from offbeat.telemetry.logs import new_incarnation
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.tracker import ExportPlace, Sink, SinkUnusable, TrackedRun, Tracker

__all__ = [
    "Admission",
    "CanaryAnswer",
    "Clash",
    "Config",
    "EncodedPrompt",
    "EngineLoop",
    "EnginePlugin",
    "EngineServer",
    "EngineSpec",
    "EngineUnavailable",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentTraits",
    "Episode",
    "ExportPlace",
    "Finding",
    "FixableError",
    "GenerateRequest",
    "GenerateResult",
    "InOrder",
    "IncomingRelease",
    "InvalidRequest",
    "LoadOutcome",
    "MetricRecord",
    "ModuleEngineServer",
    "MultiTurn",
    "NamedRewards",
    "OffbeatError",
    "OutstandingGroup",
    "PluginGeneratorConfig",
    "PluginOfAgents",
    "PluginOfEnvironments",
    "PluginUnusable",
    "Prompt",
    "PromptSource",
    "ReadyFirst",
    "Response",
    "RolloutTask",
    "RunConfig",
    "Sampler",
    "SamplingParams",
    "SingleTurn",
    "Sink",
    "SinkUnusable",
    "SteppedEngine",
    "Tokenizer",
    "TrackedRun",
    "Tracker",
    "View",
    "WeightFifo",
    "WeightRelease",
    "Windowed",
    "content_ids",
    "encode_prompt",
    "end_ids_of",
    "error",
    "new_incarnation",
    "ok",
    "past_bound",
    "past_bound_in_flight",
    "warning",
]
