"""A model cut over the ranks of a world by FSDP2, and whole tensors out of and into its shards.

Every parameter is cut along its first axis, the way ``torch.chunk`` cuts. A parameter of 16 bits is
held in float32 shards, which are its masters, and gathered in 16 bits: so the forward pass sees the
weights that one rank would, and gradients are added up in float32.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.model import decoder_layers
from offbeat.weight_sync.source import dtype_name, named_weights

HALF: Final = (torch.bfloat16, torch.float16)


def world_mesh(device: str, ranks: int) -> DeviceMesh:
    """All ranks in one line, on a kind of device."""
    return init_device_mesh(device.partition(":")[0], (ranks,))


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut a model over the ranks of a mesh: each decoder layer, and what is left.

    Gradients are summed over ranks, never averaged: a step divides them once, at its end.

    Raises:
        UnsupportedModel: Its parameters are of several types.
    """
    dtypes = {each.dtype for each in model.parameters()}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        fix = "Set model.dtype to float32, or trainer.data_parallel to 1"
        raise UntrainableModel(type(model).__name__, f"has weights in {names}", fix)
    policy = MixedPrecisionPolicy()
    (dtype,) = dtypes
    if dtype in HALF:
        for each in model.parameters():
            each.data = each.data.float()
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every part that is gathered by itself."""
    return (each for each in model.modules() if isinstance(each, FSDPModule))


def settle(model: nn.Module, *, failed: bool = False) -> None:
    """Free what forward passes without a backward left gathered, or what a failure left half done.

    Weights that stay gathered would be the old ones after an optimizer step.
    """
    if isinstance(model, FSDPModule):
        if failed:
            model.reset_iter_state()
        for each in sharded_modules(model):
            each.reshard()


class Weights:
    """All weights of a model under their Hugging Face names, in a fixed order; tied ones once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._dtypes = {name: each.dtype for name, each in named_weights(model)}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights. All ranks go through it together."""
        return named_weights(self._model)

    def held(self) -> dict[str, Tensor]:
        """What this rank holds of each: the memory itself, which knows how it is cut."""
        return dict(named_weights(self._model))

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, shape and type of each."""
        for name, each in named_weights(self._model):
            yield name, tuple(each.shape), dtype_name(each)

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Take up whole weights."""
        for name, tensor in self.named():
            tensor.copy_(values[name])


class ShardedWeights(Weights):
    """The same, of a model that is cut: each rank holds a part of each."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        make_room: Callable[[PreTrainedModel], None] = lambda _: None,
    ) -> None:
        """Cut the model. ``make_room``: gives one without memory room for this rank's part."""
        super().__init__(model)
        shard(model, mesh)
        make_room(model)
        held = model.state_dict(keep_vars=True)
        self._held: dict[str, Tensor] = {name: held[name] for name in self._dtypes}
        parts = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
        self._places = [
            (name, parts[_part_with(name, parts)], model.get_submodule(name.rpartition(".")[0]))
            for name in self._dtypes
        ]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered part by part, as for a forward pass, and copied: they stay when a part is freed."""
        for part, places in itertools.groupby(self._places, key=lambda each: each[1]):
            part.unshard()
            copies = [
                (name, getattr(module, name.rpartition(".")[2]).detach().clone())
                for name, _, module in places
            ]
            part.reshard()
            yield from copies

    def held(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self._held.items()}

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        for name, each in self._held.items():
            yield name, tuple(each.shape), str(self._dtypes[name]).removeprefix("torch.")

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        for name, each in self._held.items():
            own(each.detach()).copy_(part_of(values[name], each))


def _part_with(weight: str, parts: Collection[str]) -> str:
    """The name of the smallest part that has a weight of this name."""
    return max(
        (each for each in parts if f"{weight}.".startswith(f"{each}." if each else "")), key=len
    )


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the memory it is held in."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(values: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of whole values, if they are cut as ``like`` is."""
    if not isinstance(like, DTensor):
        return values
    mesh = like.device_mesh
    rows = -(-values.shape[0] // mesh.size())
    first = rows * mesh.get_local_rank()
    return values[first : first + rows]


def cut_like(part: Tensor, like: Tensor) -> Tensor:
    """A rank's part of something that is cut as ``like`` is, with the knowledge of how; no copy."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=cast("tuple[int, ...]", like.stride()),
    )
