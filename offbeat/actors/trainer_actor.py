"""Ray actors of trainer ranks.

These are sync actors with one call at a time (the driver sets ``max_concurrency=1``). They execute
calls in the order in which the controller makes them.
"""

# pyright: reportIncompatibleMethodOverride=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# Ray declares functions without the types of their parameters, and a marked method as a remote one.

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import ray

from offbeat.actors.ray_run_files import SHARE_FIX, set_up_files
from offbeat.config.base import of_kind
from offbeat.config.limits import rank_resources
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.fakes.trainer import make_stub_rank
from offbeat.messages.fences import Fence
from offbeat.telemetry.logs import pause_collections
from offbeat.trainers.held_columns import Places
from offbeat.trainers.rank import MakeRank, TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.trainer_plugin import find_trainer
from offbeat.transfer_queue.schema import Columns


def node_address() -> str:
    """Return the address that Ray uses for this machine."""
    return ray.util.get_node_ip_address()


class TrainerActor(TrainerRank):
    """A trainer rank as a Ray actor, in a process of the cluster."""

    def __init__(self, spec: TrainerSpec, make: MakeRank) -> None:
        """``make`` is called after all other ranks have joined, or at once without others."""
        place = set_up_files(
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
        """Return one object with names and sizes, and one with columns that a worker fetches."""
        return super().prepare_logprobs(fence, loss, places, sent, *payloads)


class PluginTrainerActor(TrainerActor):
    """One rank of a model that a plug-in trains."""

    def __init__(self, spec: TrainerSpec) -> None:
        plugin = find_trainer(spec.config.trainer.backend)
        if plugin is None:
            raise TypeError(f"trainer.backend={spec.config.trainer.backend} is not a plug-in")
        self._for_process = ExitStack()  # active for the lifetime of this process
        plugin.prepare_process(spec.config, self._for_process)
        super().__init__(spec, partial(plugin.make_rank, spec))


class StubTrainerActor(TrainerActor):
    """One stub rank for all ranks of a dry run. Its process loads torch only for TensorDict."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec, partial(make_stub_rank, spec))


class TorchTrainerActor(TrainerActor):
    """One rank of a Hugging Face model, whole or sharded over several ranks."""

    def __init__(self, spec: TrainerSpec) -> None:
        with pause_collections():
            import torch

            from offbeat.trainers.torch.torch_trainer import make_torch_rank

        trainer = of_kind(TorchTrainerConfig, spec.config.trainer)
        torch.set_num_threads(rank_resources(trainer, spec.rank, spec.ranks).threads)
        super().__init__(spec, partial(make_torch_rank, spec))
