"""Loading of a sharded model: rank 0 reads it, each rank keeps its part.

Every rank makes the model without memory, shards it, and allocates its own part only. Then rank 0,
which alone has read the files, broadcasts tensor by tensor; each rank copies its part.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.model import unfilled_model
from offbeat.trainers.torch.sharding import Weights, own, part_of
from offbeat.weight_sync.chunks import named_weights


def shell_of(path: str | Path, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return the causal LM of a directory without memory for its weights, in evaluation mode."""
    config = AutoConfig.from_pretrained(
        path, trust_remote_code=trust_remote_code, local_files_only=True
    )
    return unfilled_model(config, dtype, trust_remote_code=trust_remote_code).eval()


def make_room(model: PreTrainedModel, device: str) -> None:
    """Allocate this rank's part, and all buffers, of a model that was sharded without memory.

    Raises:
        UntrainableModel: It keeps a tensor elsewhere, which would not be filled.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                problem = f"keeps {name}.{attribute}, which is neither a weight nor a buffer"
                fix = "Set trainer.data_parallel to 1"
                raise UntrainableModel(type(model).__name__, problem, fix)


@torch.no_grad()
def spread(
    source: PreTrainedModel | None, model: PreTrainedModel, weights: Weights, device: torch.device
) -> None:
    """Fill this rank's weights and buffers of a sharded model. All ranks call it together.

    Args:
        source: The whole model, on rank 0; None on the others.
        model: Sharded, with this rank's part allocated.
        weights: Weights of ``model``.
        device: Device of the ranks' collectives.
    """
    given = {} if source is None else dict(named_weights(source))
    parts = weights.local_tensors()
    for name, shape, dtype in weights.metas():
        whole = from_first(given.get(name), shape, getattr(torch, dtype), device)
        if name in parts:
            own(parts[name]).copy_(part_of(whole, parts[name]))
    given = {} if source is None else dict(source.named_buffers())
    buffers = dict(model.named_buffers())
    for name, shape, dtype in weights.buffers():
        whole = from_first(given.get(name), shape, dtype, device)
        if name in buffers:
            buffers[name].copy_(whole)


def fill_like(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the model's settings that files store besides the weights, for a later export."""
    model.generation_config = source.generation_config
    model._weight_conversions = source._weight_conversions  # noqa: SLF001 -- how it was renamed


def from_first(
    given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the tensor of rank 0, which alone is ``given`` it, on every rank."""
    if given is None:
        whole = torch.empty(shape, dtype=dtype, device=device)
    else:
        whole = given.detach().to(device, dtype).contiguous()
    dist.broadcast(whole, src=0)
    return whole
