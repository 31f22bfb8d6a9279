"""From a backend's name to its actor class; imports only what is chosen."""

from typing import Any


def engine_class(backend: str) -> type[Any]:
    """The actor class of ``generator.backend``."""
    if backend == "stub":
        from offbeat.actors.generators.stub_actor import StubEngineActor

        return StubEngineActor
    if backend == "vllm":
        from offbeat.actors.generators.vllm.actor import VllmEngineActor

        return VllmEngineActor
    from offbeat.actors.generators.embedded_actor import EmbeddedEngineActor

    return EmbeddedEngineActor


def trainer_class(backend: str) -> type[Any]:
    """The actor class of ``trainer.backend``."""
    if backend == "stub":
        from offbeat.actors.trainers.stub_actor import StubTrainerActor

        return StubTrainerActor
    if backend == "megatron":
        from offbeat.actors.trainers.megatron.actor import MegatronTrainerActor

        return MegatronTrainerActor
    from offbeat.actors.trainers.torch_actor import TorchTrainerActor

    return TorchTrainerActor
