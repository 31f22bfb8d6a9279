"""The server of a plain engine: the base class has its weights, its canary and its loop."""

import time
from collections.abc import Callable
from concurrent.futures import Executor

from offbeat.interfaces import EngineSpec, ModuleEngineServer, new_incarnation


class PlainServer(ModuleEngineServer):
    """Serves a model of transformers with a ``PlainEngine``."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        steps_in: Executor | None = None,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Load the model; torch is imported here, where an engine runs."""
        import torch
        from transformers import AutoModelForCausalLM

        from offbeat.interfaces import EngineLoop, end_ids_of
        from offbeat_plain.engine import PlainEngine

        dtype = getattr(torch, spec.model.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            spec.model.path, dtype=dtype, local_files_only=True
        )
        incarnation = new_incarnation(spec.name)
        engine = PlainEngine(
            model,
            name=spec.name,
            incarnation=incarnation,
            end_ids=end_ids_of(spec.model.path),
            max_model_len=spec.generator.max_model_len,
            seed=spec.seed,
        )
        loop = EngineLoop(engine, steps_in)
        super().__init__(spec, loop, model, incarnation, cpu_clock=cpu_clock)
