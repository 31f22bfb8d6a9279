"""Maps a backend's name to its actor class; imports only the chosen one."""

from typing import Any, Literal, assert_never


def engine_class(backend: Literal["embedded", "stub", "vllm"]) -> type[Any]:
    """Return the actor class of ``generator.backend``."""
    if backend == "stub":
        from offbeat.actors.engine_actor import StubEngineActor

        return StubEngineActor
    if backend == "vllm":
        from offbeat.actors.vllm_engine_actor import VllmEngineActor

        return VllmEngineActor
    if backend == "embedded":
        from offbeat.actors.engine_actor import EmbeddedEngineActor

        return EmbeddedEngineActor
    assert_never(backend)


def trainer_class(backend: str) -> type[Any]:
    """Return the actor class of ``trainer.backend``."""
    if backend == "stub":
        from offbeat.actors.stub_trainer_actor import StubTrainerActor

        return StubTrainerActor
    if backend == "torch":
        from offbeat.actors.torch_trainer_actor import TorchTrainerActor

        return TorchTrainerActor
    from offbeat.actors.plugin_trainer_actor import PluginTrainerActor

    return PluginTrainerActor
