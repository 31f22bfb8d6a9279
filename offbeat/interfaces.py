"""Interfaces of plug-ins: the names that a package of plug-ins imports from offbeat.

Each is imported at its first use, so a module of a plug-in may import any of them.
"""

from typing import Final

from offbeat.public_names import import_on_use

_MODULES: Final = {
    "Admission": "offbeat.sampler.policy",
    "CanaryAnswer": "offbeat.messages.weights",
    "Clash": "offbeat.config.problems",
    "Config": "offbeat.config.base",
    "EncodedPrompt": "offbeat.environments.protocol",
    "EngineLoop": "offbeat.generators.engine_loop",
    "EnginePlugin": "offbeat.config.engine_plugin",
    "EngineServer": "offbeat.generators.engine_server",
    "EngineSpec": "offbeat.generators.spec",
    "EngineUnavailable": "offbeat.messages.failures",
    "Environment": "offbeat.environments.protocol",
    "EnvironmentConfig": "offbeat.config.sections.environment",
    "EnvironmentTraits": "offbeat.config.environment_traits",
    "Episode": "offbeat.environments.protocol",
    "ExportPlace": "offbeat.telemetry.tracker",
    "Finding": "offbeat.messages.finding",
    "FixableError": "offbeat.messages.failures",
    "GenerateRequest": "offbeat.messages.generation",
    "GenerateResult": "offbeat.messages.generation",
    "InOrder": "offbeat.sampler.in_order",
    "IncomingRelease": "offbeat.generators.incoming",
    "InvalidRequest": "offbeat.messages.failures",
    "LoadOutcome": "offbeat.generators.engine_server",
    "MetricRecord": "offbeat.telemetry.records",
    "ModuleEngineServer": "offbeat.generators.module_server",
    "MultiTurn": "offbeat.environments.protocol",
    "NamedRewards": "offbeat.environments.reward_value",
    "OffbeatError": "offbeat.messages.failures",
    "OutstandingGroup": "offbeat.sampler.policy",
    "PluginGeneratorConfig": "offbeat.config.sections.generator",
    "PluginOfAgents": "offbeat.environments.environment_plugin",
    "PluginOfEnvironments": "offbeat.environments.environment_plugin",
    "PluginUnusable": "offbeat.doors",
    "Prompt": "offbeat.messages.groups",
    "PromptSource": "offbeat.environments.prompts",
    "ReadyFirst": "offbeat.sampler.ready_first",
    "Response": "offbeat.environments.protocol",
    "RolloutTask": "offbeat.messages.groups",
    "RunConfig": "offbeat.config.run",
    "Sampler": "offbeat.sampler.policy",
    "SamplingParams": "offbeat.messages.generation",
    "SingleTurn": "offbeat.environments.protocol",
    "Sink": "offbeat.telemetry.tracker",
    "SinkUnusable": "offbeat.telemetry.tracker",
    "SteppedEngine": "offbeat.generators.engine_loop",
    "Tokenizer": "offbeat.environments.text",
    "TrackedRun": "offbeat.telemetry.tracker",
    "Tracker": "offbeat.telemetry.tracker",
    "View": "offbeat.sampler.policy",
    "WeightFifo": "offbeat.sampler.ready_first",
    "WeightRelease": "offbeat.messages.weights",
    "Windowed": "offbeat.sampler.windowed",
    "content_ids": "offbeat.environments.text",
    "encode_prompt": "offbeat.environments.text",
    "end_ids_of": "offbeat.generators.end_tokens",
    "error": "offbeat.messages.finding",
    "new_incarnation": "offbeat.telemetry.logs",
    "ok": "offbeat.messages.finding",
    "past_bound": "offbeat.sampler.policy",
    "past_bound_in_flight": "offbeat.sampler.policy",
    "warning": "offbeat.messages.finding",
}
"""The module of each interface. ``interfaces.pyi`` declares them to type checkers."""

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll] -- the stub lists them

__getattr__, __dir__ = import_on_use(__name__, _MODULES)
