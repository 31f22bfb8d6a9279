"""Process groups of a layout; megatron-core keeps one set per process."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# megatron-core has no types.

from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state as megatron_groups
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.megatron.errors import UnsupportedLayout
from offbeat.trainers.megatron.layout import ParallelLayout
from offbeat.trainers.ranks.peers import Peers


def start_groups(config: MegatronTrainerConfig, peers: Peers) -> ParallelLayout:
    """Create the process groups of the config's layout, once per process.

    The default process group exists already, unless the world has one rank.

    Raises:
        UnsupportedLayout: The parallel sizes do not make up the world, or do not go together.
    """
    if peers.size == 1 and not dist.is_initialized():
        # The library needs groups even in a world of one rank.
        backend = "gloo" if config.device == "cpu" else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    model = config.tensor_parallel * config.pipeline_parallel
    if config.data_parallel * model != world:
        want = (
            f"{world} ranks over tensor_parallel x pipeline_parallel = {model}: {world / model:g}"
        )
        raise UnsupportedLayout("trainer.data_parallel", str(config.data_parallel), want)
    if config.data_parallel % config.expert_parallel:
        want = f"a divisor of trainer.data_parallel = {config.data_parallel}"
        raise UnsupportedLayout("trainer.expert_parallel", str(config.expert_parallel), want)
    megatron_groups.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
    )
    return ParallelLayout(
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        expert=config.expert_parallel,
        data=config.data_parallel,
        tensor_rank=megatron_groups.get_tensor_model_parallel_rank(),
        pipeline_rank=megatron_groups.get_pipeline_model_parallel_rank(),
        expert_rank=megatron_groups.get_expert_model_parallel_rank(),
        data_rank=megatron_groups.get_data_parallel_rank(),
    )


def tensor_group() -> ProcessGroup:
    """Return the group of the ranks that hold pieces of the same matrices."""
    return cast("ProcessGroup", megatron_groups.get_tensor_model_parallel_group())


def pipeline_group() -> ProcessGroup:
    """Return the group of the stages of this rank's replica."""
    return cast("ProcessGroup", megatron_groups.get_pipeline_model_parallel_group())


def expert_group() -> ProcessGroup:
    """Return the group of the ranks that exchange tokens for their experts."""
    return cast("ProcessGroup", megatron_groups.get_expert_model_parallel_group())
