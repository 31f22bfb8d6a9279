"""Maps a backend's name to its actor class; imports only the chosen one."""

from typing import Any


def engine_class(backend: str) -> type[Any]:
    """Return the actor class of ``generator.backend``."""
    if backend == "stub":
        from offbeat.actors.stub_engine_actor import StubEngineActor

        return StubEngineActor
    if backend == "vllm":
        from offbeat.actors.vllm_engine_actor import VllmEngineActor

        return VllmEngineActor
    from offbeat.actors.embedded_engine_actor import EmbeddedEngineActor

    return EmbeddedEngineActor


def trainer_class(backend: str) -> type[Any]:
    """Return the actor class of ``trainer.backend``."""
    if backend == "stub":
        from offbeat.actors.stub_trainer_actor import StubTrainerActor

        return StubTrainerActor
    if backend == "megatron":
        from offbeat.actors.megatron_trainer_actor import MegatronTrainerActor

        return MegatronTrainerActor
    from offbeat.actors.torch_trainer_actor import TorchTrainerActor

    return TorchTrainerActor
