"""Ray actor of a vLLM engine."""

from offbeat.actors.engine_actor import EngineActor
from offbeat.actors.ray_run_files import set_up_files
from offbeat.generators.spec import EngineSpec
from offbeat.plugins.vllm.server import Started, VllmEngineServer


class VllmEngineActor(EngineActor, VllmEngineServer):
    """Ray actor of a vLLM engine. Its first reply comes after a real request has passed through."""

    def __init__(self, spec: EngineSpec, started: Started | None = None) -> None:
        """``started``: a running engine to use unchanged; tests share it."""
        place = set_up_files(spec.name, spec.run_dir, spec.sharing)
        super().__init__(spec, place, started)
