"""Server of the embedded engine.

torch is imported only when a server is created, because every process with a handle to the engine's
actor imports this module.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from offbeat.config.base import of_kind
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.generators.module_server import ModuleEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.telemetry.logs import new_incarnation

if TYPE_CHECKING:
    from offbeat.generators.embedded.start import LoadModel
    from offbeat.generators.engine_loop import StepTurns


class EmbeddedEngineServer(ModuleEngineServer):
    """Server of an embedded engine in this process."""

    def __init__(
        self,
        spec: EngineSpec,
        incarnation: str | None = None,
        *,
        steps_in: Executor | None = None,
        cpu_clock: Callable[[], float] = time.process_time,
        load: "LoadModel | None" = None,
        turns: "StepTurns | None" = None,
    ) -> None:
        """Load the model and start its engine.

        Blocks for seconds. Needs no event loop.

        Args:
            spec: Specification of the engine.
            incarnation: Unique name of this incarnation of the engine, or None for a new name.
            steps_in: Executor with one thread that runs the engine, or None for a new one.
            cpu_clock: Returns the CPU seconds of the engine.
            load: Loads the model, or None to load it from its files.
            turns: Decides when the engine may step, or None if it always may.
        """
        from offbeat.generators.embedded.start import start_loop

        incarnation = incarnation or new_incarnation(spec.name)
        engine, module = start_loop(spec, incarnation, steps_in, load, turns)
        device = of_kind(EmbeddedGeneratorConfig, spec.generator).device
        super().__init__(spec, engine, module, incarnation, device, cpu_clock=cpu_clock)
