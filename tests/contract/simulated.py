"""The simulator's actors behind its network, which is quiet but for the faults that a test asks for."""

import random
from collections.abc import Awaitable, Callable

from offbeat.config.run import RunConfig
from offbeat.messages.fences import Fence
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.controller_ports import Caller
from offbeat.plugins.simulation.faults import Faults
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.network import SimulatedNetwork
from offbeat.plugins.simulation.processes import Process
from offbeat.plugins.simulation.schedule import PlannedFault


def simulate(
    config: RunConfig,
    main: Callable[[SimulationContext, Caller], Awaitable[None]],
    *planned_faults: PlannedFault,
) -> None:
    """Run ``main`` in the process of a controller of incarnation 1, on a virtual clock."""
    loop = VirtualLoop(random.Random(0), max_events=10_000, max_s=1000)
    dice = random.Random(1)
    faults = Faults(planned_faults, loop, lambda *_: None)
    context = SimulationContext(
        config, loop, dice, faults, SimulatedNetwork(loop, dice, faults), []
    )
    controller = Process("controller")

    async def body() -> None:
        await main(context, Caller(context, controller, Fence("run", 1)))

    try:
        loop.run_until_complete(loop.create_task(body(), context=controller.context))
    finally:
        loop.close()
