"""What a trainer is put together from; tests exchange them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig

from offbeat.trainers.megatron.gradients import Gradients
from offbeat.trainers.megatron.optimizer import MainGradAdamW, RankOptimizer
from offbeat.trainers.megatron.sharded_optimizer import ShardedAdamW


@dataclass(frozen=True, slots=True)
class BackendParts:
    """The usual ones, unless told otherwise."""

    gradients: Callable[[DistributedDataParallel, TransformerConfig], Gradients] = Gradients
    optimizer: type[RankOptimizer] | None = None
    """None: ``optimizer_for`` chooses."""

    overlap_grad_reduce: bool = False


def optimizer_for(device: torch.device, dtype: torch.dtype) -> type[RankOptimizer]:
    """The library's own on CUDA, dealt over data-parallel ranks; it knows no float64."""
    is_dealt = device.type == "cuda" and dtype != torch.float64
    return ShardedAdamW if is_dealt else MainGradAdamW
