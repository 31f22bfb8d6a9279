"""Maps a backend's name to its actor class and imports only the chosen class."""

from typing import Any

from offbeat.config.engine_plugin import find_engine


def engine_class(backend: str) -> type[Any]:
    """Return the actor class of ``generator.backend``. The backend must have engines.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    plugin = find_engine(backend)
    if plugin is not None:
        from offbeat.actors.engine_actor import make_actor_class

        return plugin.actor_class() or make_actor_class(plugin.server_class())
    if backend == "stub":
        from offbeat.actors.engine_actor import StubEngineActor

        return StubEngineActor
    from offbeat.actors.engine_actor import EmbeddedEngineActor

    return EmbeddedEngineActor


def trainer_class(backend: str) -> type[Any]:
    """Return the actor class of ``trainer.backend``."""
    from offbeat.actors import trainer_actor

    of_core = {"stub": trainer_actor.StubTrainerActor, "torch": trainer_actor.TorchTrainerActor}
    return of_core.get(backend, trainer_actor.PluginTrainerActor)
