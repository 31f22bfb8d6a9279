"""The shared world of ranks, with megatron-core on the CPU: through a shim, inside a job only.

A worker enters the shim when a job begins and leaves it when it ends, so that the same processes
serve the other suites.
"""

from typing import Any

from world import World


class MegatronWorld:
    """Runs jobs of ``megatron_jobs``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def run(self, ranks: int, job: str, **arguments: Any) -> list[Any]:
        """The job's answer on every rank; raises as ``World.run``."""
        return self._world.run(ranks, "megatron_jobs:run", name=job, arguments=arguments)
