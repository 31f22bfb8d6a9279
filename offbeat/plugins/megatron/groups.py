"""Creates the process groups of a layout. megatron-core keeps one set per process."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# megatron-core has no types.

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state as megatron_groups
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from offbeat.config.limits import encoder_ranks
from offbeat.plugins.megatron.errors import UnsupportedLayout
from offbeat.plugins.megatron.layout import ParallelLayout, make_grid
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.ranks.peers import Peers


def start_groups(config: MegatronTrainerConfig, peers: Peers) -> ParallelLayout:
    """Create the process groups of the config's layout, once per process.

    The default process group already exists, unless the world has one rank. Encoder ranks, which
    come after the ranks of the layout, call it too but are in none of the groups.

    Raises:
        UnsupportedLayout: The parallel sizes contradict each other or the size of the world.
    """
    if peers.size == 1 and not dist.is_initialized():
        # The library needs groups even in a world of one rank.
        backend = "gloo" if config.device == "cpu" else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    grid, world = make_grid(config), dist.get_world_size() - encoder_ranks(config)
    if grid.ranks != world:
        want = f"{world} ranks over tensor x context x pipeline = {grid.model_ranks}"
        data = f"{want}: {world / grid.model_ranks:g}"
        raise UnsupportedLayout("trainer.data_parallel", str(grid.data), data)
    with _limit_world(world):
        megatron_groups.initialize_model_parallel(
            tensor_model_parallel_size=grid.tensor,
            pipeline_model_parallel_size=grid.pipeline,
            context_parallel_size=grid.context,
            expert_model_parallel_size=grid.expert,
            expert_tensor_parallel_size=grid.expert_tensor_ranks,
            # Not rounded: it becomes a timedelta. The library's default, half an hour, is too long.
            distributed_timeout_minutes=peers.timeout_s / 60,  # pyright: ignore[reportArgumentType]
        )
    if peers.rank >= world:
        megatron_groups.destroy_model_parallel()  # the library's state on ranks without groups
    return ParallelLayout(grid, dist.get_rank())


@contextmanager
def _limit_world(ranks: int) -> Generator[None]:
    """Hide all but the first ranks from the library, which would otherwise use all of torch's.

    All ranks of the world must create every group, including ranks that are in none.
    """
    of_world = dist.get_world_size

    def count_ranks(group: ProcessGroup | None = None) -> int:
        return ranks if group is None else of_world(group)

    dist.get_world_size = count_ranks
    try:
        yield
    finally:
        dist.get_world_size = of_world


def layout_group() -> ProcessGroup:
    """Return the group of all ranks of the layout."""
    return cast("ProcessGroup", megatron_groups.get_intra_distributed_optimizer_instance_group())


def embedding_ranks_group() -> ProcessGroup:
    """Return the group of the ranks that share a stage's rows of tokens, or its matrices."""
    return cast("ProcessGroup", megatron_groups.get_tensor_and_context_parallel_group())


def tensor_group() -> ProcessGroup:
    """Return the group of the ranks that hold pieces of the same matrices."""
    return cast("ProcessGroup", megatron_groups.get_tensor_model_parallel_group())


def pipeline_group() -> ProcessGroup:
    """Return the group of the stages of this rank's replica."""
    return cast("ProcessGroup", megatron_groups.get_pipeline_model_parallel_group())


def context_group() -> ProcessGroup:
    """Return the group of the ranks that share each row of tokens."""
    return cast("ProcessGroup", megatron_groups.get_context_parallel_group())


def expert_group() -> ProcessGroup:
    """Return the group of the ranks that exchange tokens for their experts."""
    return cast("ProcessGroup", megatron_groups.get_expert_tensor_and_model_parallel_group())
