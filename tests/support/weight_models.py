"""A small model with everything that makes a transfer difficult."""

import torch
from torch import Tensor, nn

from offbeat.weight_sync.chunks import iterate_weights


class Model(nn.Module):
    """Mixed types, a tied weight, a buffer, odd sizes, a tensor without elements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5).double()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.half = nn.Linear(5, 3).bfloat16()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("bias", torch.rand(3))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in iterate_weights(model)}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
