from offbeat.config.base import (
    Config as Config,
)
from offbeat.config.engine_plugin import (
    EnginePlugin as EnginePlugin,
)
from offbeat.config.environment_traits import (
    EnvironmentTraits as EnvironmentTraits,
)
from offbeat.config.problems import (
    Clash as Clash,
)
from offbeat.config.run import (
    RunConfig as RunConfig,
)
from offbeat.config.sections.environment import (
    EnvironmentConfig as EnvironmentConfig,
)
from offbeat.config.sections.generator import (
    PluginGeneratorConfig as PluginGeneratorConfig,
)
from offbeat.doors import (
    PluginUnusable as PluginUnusable,
)
from offbeat.environments.environment_plugin import (
    PluginOfAgents as PluginOfAgents,
)
from offbeat.environments.environment_plugin import (
    PluginOfEnvironments as PluginOfEnvironments,
)
from offbeat.environments.prompts import (
    PromptSource as PromptSource,
)
from offbeat.environments.protocol import (
    EncodedPrompt as EncodedPrompt,
)
from offbeat.environments.protocol import (
    Environment as Environment,
)
from offbeat.environments.protocol import (
    Episode as Episode,
)
from offbeat.environments.protocol import (
    MultiTurn as MultiTurn,
)
from offbeat.environments.protocol import (
    Response as Response,
)
from offbeat.environments.protocol import (
    SingleTurn as SingleTurn,
)
from offbeat.environments.reward_value import (
    NamedRewards as NamedRewards,
)
from offbeat.environments.text import (
    Tokenizer as Tokenizer,
)
from offbeat.environments.text import (
    content_ids as content_ids,
)
from offbeat.environments.text import (
    encode_prompt as encode_prompt,
)
from offbeat.generators.end_tokens import (
    end_ids_of as end_ids_of,
)
from offbeat.generators.engine_loop import (
    EngineLoop as EngineLoop,
)
from offbeat.generators.engine_loop import (
    SteppedEngine as SteppedEngine,
)
from offbeat.generators.engine_server import (
    EngineServer as EngineServer,
)
from offbeat.generators.engine_server import (
    LoadOutcome as LoadOutcome,
)
from offbeat.generators.incoming import (
    IncomingRelease as IncomingRelease,
)
from offbeat.generators.module_server import (
    ModuleEngineServer as ModuleEngineServer,
)
from offbeat.generators.spec import (
    EngineSpec as EngineSpec,
)
from offbeat.messages.failures import (
    EngineUnavailable as EngineUnavailable,
)
from offbeat.messages.failures import (
    FixableError as FixableError,
)
from offbeat.messages.failures import (
    InvalidRequest as InvalidRequest,
)
from offbeat.messages.failures import (
    OffbeatError as OffbeatError,
)
from offbeat.messages.finding import (
    Finding as Finding,
)
from offbeat.messages.finding import (
    error as error,
)
from offbeat.messages.finding import (
    ok as ok,
)
from offbeat.messages.finding import (
    warning as warning,
)
from offbeat.messages.generation import (
    GenerateRequest as GenerateRequest,
)
from offbeat.messages.generation import (
    GenerateResult as GenerateResult,
)
from offbeat.messages.generation import (
    SamplingParams as SamplingParams,
)
from offbeat.messages.groups import (
    Prompt as Prompt,
)
from offbeat.messages.groups import (
    RolloutTask as RolloutTask,
)
from offbeat.messages.weights import (
    CanaryAnswer as CanaryAnswer,
)
from offbeat.messages.weights import (
    WeightRelease as WeightRelease,
)
from offbeat.sampler.in_order import (
    InOrder as InOrder,
)
from offbeat.sampler.policy import (
    Admission as Admission,
)
from offbeat.sampler.policy import (
    OutstandingGroup as OutstandingGroup,
)
from offbeat.sampler.policy import (
    Sampler as Sampler,
)
from offbeat.sampler.policy import (
    View as View,
)
from offbeat.sampler.policy import (
    past_bound as past_bound,
)
from offbeat.sampler.policy import (
    past_bound_in_flight as past_bound_in_flight,
)
from offbeat.sampler.ready_first import (
    ReadyFirst as ReadyFirst,
)
from offbeat.sampler.ready_first import (
    WeightFifo as WeightFifo,
)
from offbeat.sampler.windowed import (
    Windowed as Windowed,
)
from offbeat.telemetry.logs import (
    new_incarnation as new_incarnation,
)
from offbeat.telemetry.records import (
    MetricRecord as MetricRecord,
)
from offbeat.telemetry.tracker import (
    ExportPlace as ExportPlace,
)
from offbeat.telemetry.tracker import (
    Sink as Sink,
)
from offbeat.telemetry.tracker import (
    SinkUnusable as SinkUnusable,
)
from offbeat.telemetry.tracker import (
    TrackedRun as TrackedRun,
)
from offbeat.telemetry.tracker import (
    Tracker as Tracker,
)

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
