"""From a backend's name to its actor class; imports only what is chosen."""

from typing import Any


def engine_class(backend: str) -> type[Any]:
    """The actor class of ``generator.backend``."""
    if backend == "stub":
        from offbeat.actors.generators.stub_actor import StubEngineActor

        return StubEngineActor
    from offbeat.actors.generators.embedded_actor import EmbeddedEngineActor

    return EmbeddedEngineActor


def trainer_class(backend: str) -> type[Any]:
    """The actor class of ``trainer.backend``."""
    if backend == "stub":
        from offbeat.actors.trainers.stub_actor import StubTrainerActor

        return StubTrainerActor
    from offbeat.actors.trainers.torch_actor import TorchTrainerActor

    return TorchTrainerActor
