"""Replaceable parts of a trainer; tests replace them."""

# pyright: reportMissingTypeStubs=false
# megatron-core has no types.

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
    """Parts that a trainer is assembled from; the defaults are those of production."""

    gradients: Callable[[DistributedDataParallel, TransformerConfig], Gradients] = Gradients
    optimizer: type[RankOptimizer] | None = None
    """None: ``optimizer_for`` chooses."""

    overlap_grad_reduce: bool = False


def optimizer_for(device: torch.device, dtype: torch.dtype) -> type[RankOptimizer]:
    """Return ``ShardedAdamW`` on CUDA, but for float64, which it does not support."""
    is_sharded = device.type == "cuda" and dtype != torch.float64
    return ShardedAdamW if is_sharded else MainGradAdamW
