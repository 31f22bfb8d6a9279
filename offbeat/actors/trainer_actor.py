"""Base of the Ray actors of trainer ranks.

A sync actor with one call at a time (``max_concurrency=1``, which the driver sets): calls are
executed in the order in which the controller makes them.

Address of this machine, under which other machines of the cluster reach it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.
# pyright: reportIncompatibleMethodOverride=false, reportUnknownMemberType=false
# Ray declares functions without the types of their parameters, and a marked method as a remote one.

from collections.abc import Sequence

import ray

from offbeat.actors.ray_run_files import SHARE_FIX, prepared
from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import Fence
from offbeat.trainers.held_columns import Places
from offbeat.trainers.rank import MakeRank, TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.schema import Columns


def node_address() -> str:
    """Return the address under which Ray knows this machine."""
    return ray.util.get_node_ip_address()


class TrainerActor(TrainerRank):
    """A trainer rank as a Ray actor, in a process of the cluster."""

    def __init__(self, spec: TrainerSpec, make: MakeRank) -> None:
        """``make`` is called once the other ranks have joined; at once if there are none."""
        place = prepared(
            spec.process,
            spec.run_dir,
            spec.sharing,
            spec.config,
            needs_to_share=SHARE_FIX if spec.ranks > 1 else "",
        )
        super().__init__(spec, make, place, node_address)

    @ray.method(num_returns=2)
    def prepare_logprobs(
        self, fence: Fence, loss: LossSpec, places: Places, sent: int, *payloads: Sequence[Columns]
    ) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], list[Columns]]:
        """Return names and sizes as one object, the columns as another, which a worker may fetch."""
        return super().prepare_logprobs(fence, loss, places, sent, *payloads)
