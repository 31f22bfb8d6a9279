"""Shards a model over the ranks of a world by FSDP2, and converts whole tensors from and to shards.

Every parameter is sharded along its first axis, as by ``torch.chunk``. If tensor ranks divide a
matrix (``tensor_parallel``), each tensor rank's part is sharded over the data ranks that hold it. A
trained 16-bit parameter is kept in float32 shards, which are its masters, and gathered in 16 bits.
So the forward pass uses the same weights as on one rank, and gradients are summed in float32. A
frozen parameter keeps its dtype.

The ranks of a sharded model form two axes: data-parallel ranks, and tensor-parallel ranks within
each. Rank ``d * tensor + t`` is tensor rank ``t`` of replica ``d``. Every collective of a step runs
along one axis: FSDP2 gathers and reduces over ``data``, divided matrices over ``tensor``.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.models.plain import HALF
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.model import decoder_layers
from offbeat.trainers.torch_versions import refuse_sharding
from offbeat.weight_sync.chunks import dtype_name, iterate_weights
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, chunk_cuts
from offbeat.weight_sync.region import cut_part as part_of_region


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    divide: Callable[[PreTrainedModel], None] = lambda _: None,
) -> None:
    """Shard a model over the ranks of a mesh: each decoder layer, then the rest.

    Gradients are summed over ranks, not averaged, because a step divides them once, at its end. If
    ``divide`` is set, it divides matrices over tensor ranks before each part is sharded.

    Raises:
        UntrainableModel: The model's parameters have several dtypes, or this torch is too old.
    """
    if refusal := refuse_sharding(torch.__version__):
        raise UntrainableModel(type(model).__name__, *refusal)
    dtypes = {each.dtype for each in model.parameters()}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        fix = "Set model.dtype to float32, or trainer.data_parallel to 1"
        raise UntrainableModel(type(model).__name__, f"has weights in {names}", fix)
    policy = MixedPrecisionPolicy()
    (dtype,) = dtypes
    if dtype in HALF:
        for each in model.parameters():
            if each.requires_grad:
                each.data = each.data.float()
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    divide(model)  # the masters, because the dtype of a divided parameter cannot change later
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in iterate_sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
        # A weight that one rank's rows do not use has no gradient there. It would shift the later
        # gradients in the buffer that the ranks add up
        module.set_reduce_scatter_unused_params(True)


def class_name(model: nn.Module) -> str:
    """Return a model's class name in its library. ``fully_shard`` puts another class before it."""
    return next(each.__name__ for each in type(model).__mro__ if not issubclass(each, FSDPModule))


def iterate_sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield every module that is gathered separately."""
    return (each for each in model.modules() if isinstance(each, FSDPModule))


def settle(model: nn.Module) -> None:
    """Free weights that are still gathered after a forward pass without backward.

    After an optimizer step they would be stale.
    """
    if isinstance(model, FSDPModule):
        for each in iterate_sharded_modules(model):
            each.reshard()


@contextmanager
def reset_after_error(model: nn.Module) -> Generator[None]:
    """Clean up if a pass through the model raises inside the block.

    Earlier gradients are kept. torch 2.15 would drop them with the gradients of the pass.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    gradients = [(each, each.grad) for each in model.parameters()]
    try:
        yield
    except BaseException:
        if _has_begun(model):
            model.reset_iter_state()
        settle(model)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        raise


def _has_begun(model: FSDPModule) -> bool:
    """Return whether a pass through the model has begun. Before the first, no reset is needed.

    torch's reset would fail then, and its error would replace the error that ended the pass.
    """
    return fully_shard.state(model)._is_root is not None  # noqa: SLF001  # pyright: ignore -- undocumented


class Weights:
    """All weights of a model by Hugging Face name, in a fixed order, tied weights once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._dtypes = {name: each.dtype for name, each in iterate_weights(model)}

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name. All ranks must iterate together."""
        return iterate_weights(self._model)

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each weight: the tensor itself, a DTensor if it is sharded."""
        return dict(iterate_weights(self._model))

    def held_regions(self) -> list[TensorRegion]:
        """Return this rank's regions of the weights, in the memory that training updates."""
        return [
            TensorRegion(name, local_region(each), own(each))
            for name, each in self.local_tensors().items()
        ]

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, whole shape and dtype of each weight."""
        for name, each in iterate_weights(self._model):
            yield name, tuple(each.shape), dtype_name(each)

    def buffers(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield name, shape and dtype of each buffer of the whole model."""
        for name, each in self._model.named_buffers():
            yield name, tuple(each.shape), each.dtype

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy whole weights into this rank's parts."""
        for name, tensor in self.iterate():
            tensor.copy_(values[name])


class ShardedWeights(Weights):
    """All weights of a sharded model. Each rank holds a part of each."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        make_room: Callable[[PreTrainedModel], None] = lambda _: None,
        divide: Callable[[PreTrainedModel], None] = lambda _: None,
    ) -> None:
        """Shard the model like ``shard``. ``make_room`` also allocates this rank's part."""
        super().__init__(model)
        shard(model, mesh, divide)
        make_room(model)
        state = model.state_dict(keep_vars=True)
        self._local: dict[str, Tensor] = {name: state[name] for name in self._dtypes}
        parts = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
        self._places = [
            (name, parts[_part_with(name, parts)], model.get_submodule(name.rpartition(".")[0]))
            for name in self._dtypes
        ]

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights, gathered module by module. They are copies that stay valid."""
        for part, places in itertools.groupby(self._places, key=lambda each: each[1]):
            part.unshard()
            copies = [
                (name, _copy_whole(getattr(module, name.rpartition(".")[2])))
                for name, _, module in places
            ]
            part.reshard()
            yield from copies

    def local_tensors(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self._local.items()}

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        for name, each in self._local.items():
            yield name, tuple(each.shape), str(self._dtypes[name]).removeprefix("torch.")

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        for name, each in self._local.items():
            own(each.detach()).copy_(shard_like(values[name], each))


def _part_with(weight: str, parts: Collection[str]) -> str:
    """Return the name of the innermost separately gathered module that contains this weight."""
    return max(
        (each for each in parts if f"{weight}.".startswith(f"{each}." if each else "")), key=len
    )


def _copy_whole(parameter: Tensor) -> Tensor:
    """Return a whole copy of a parameter that its data ranks have gathered.

    Tensor ranks must call it together.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.full_tensor()
    return parameter.detach().clone()


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(values: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of whole values, sharded like ``like``."""
    if not isinstance(like, DTensor):
        return values
    return values[local_region(like).slices]


def local_region(tensor: Tensor) -> Region:
    """Return the region of a tensor that this rank holds. It is empty on ranks past the last row.

    The last axis of the mesh cuts first: tensor ranks divide the whole tensor, and FSDP2 shards
    each part.
    """
    region = Region.whole(tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return region
    mesh = tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[axis]
        if not placement.is_replicate():  # rows cut on both axes are not a Shard for FSDP2
            cuts = chunk_cuts(region.shape[placement.dim], mesh.size(axis))
            part = part_of_region(region.shape, placement.dim, cuts, mesh.get_local_rank(axis))
            start = tuple(map(sum, zip(region.start, part.start, strict=True)))
            region = Region.at(start, part.shape)
    return region


def cut_like(part: Tensor, like: Tensor) -> Tensor:
    """Return a local part as a tensor that is sharded like ``like``, without a copy."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


DATA: Final = "data"
TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The two axes, seen from one rank."""

    data: DeviceMesh  # ranks that hold the same part of divided matrices; FSDP2 shards over them
    tensor: DeviceMesh | None = None  # ranks of one replica; None: a replica is one rank

    def is_copied(self, parameter: Tensor) -> bool:
        """Return whether every tensor rank holds the same part of a sharded parameter."""
        if self.tensor is None:
            return False
        assert isinstance(parameter, DTensor)  # noqa: S101 -- FSDP2 makes all parameters DTensors
        names = parameter.device_mesh.mesh_dim_names or ()
        return TENSOR not in names or parameter.placements[names.index(TENSOR)].is_replicate()

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this rank counts its part of a parameter. Only one copy is counted."""
        is_first = self.tensor is None or self.tensor.get_local_rank() == 0
        return is_first or not self.is_copied(parameter)

    def equalise(self, gradients: Sequence[Tensor]) -> None:
        """Set the copies of a gradient to the first tensor rank's bits. All tensor ranks call it.

        Before, they are equal except for rounding. Kernels that add in no fixed order round
        differently on each rank, and copies of a weight would drift apart over many steps.
        """
        if self.tensor is not None:
            for each in gradients:
                dist.broadcast(each, group=self.tensor.get_group(), group_src=0)


def rank_mesh(device: str, ranks: int, tensor: int, timeout_s: float) -> RankMesh:
    """Return the axes of a world. All of its ranks must call it together.

    Args:
        device: Device of the ranks, such as ``cuda``.
        ranks: Number of ranks, a multiple of ``tensor``.
        tensor: Number of tensor-parallel ranks of a replica.
        timeout_s: How long a collective along an axis waits for a rank. Without it, torch would use
            half an hour, regardless of the world's timeout.
    """
    if tensor == 1:
        return RankMesh(init_device_mesh(_kind(device), (ranks,)))
    return mesh_of_side(device, [(range(ranks), tensor)], timeout_s)


def mesh_of_side(
    device: str, sides: Sequence[tuple[Sequence[int], int]], timeout_s: float
) -> RankMesh:
    """Return the axes of the side that holds this rank.

    All ranks of the world must call it together.

    Args:
        device: Device of the ranks.
        sides: For each side, its ranks and the number of consecutive ranks that are
            tensor-parallel.
        timeout_s: Like in ``rank_mesh``.
    """
    meshes = [_mesh(device, ranks, tensor, timeout_s) for ranks, tensor in sides]
    return next(each for each in meshes if each is not None)


def _mesh(device: str, ranks: Sequence[int], tensor: int, timeout_s: float) -> RankMesh | None:
    """Create the process groups of a side. Return its axes if this rank belongs to it."""
    replicas = [list(ranks[first : first + tensor]) for first in range(0, len(ranks), tensor)]
    alike = [list(ranks[place::tensor]) for place in range(tensor)]
    data = _own_group(alike, timeout_s)
    if tensor == 1:
        return None if data is None else RankMesh(DeviceMesh.from_group(data, _kind(device)))
    replica = _own_group(replicas, timeout_s)
    if data is None:
        return None
    mesh = DeviceMesh.from_group(
        [data, replica],
        _kind(device),
        mesh=torch.tensor(replicas),
        mesh_dim_names=(DATA, TENSOR),
    )
    return RankMesh(mesh[DATA], mesh[TENSOR])


def _own_group(groups: Sequence[list[int]], timeout_s: float) -> Any:  # noqa: ANN401 -- torch does not type it
    """Create a process group of each list of ranks. Return the one with this rank, or None."""
    patience, rank = timedelta(seconds=timeout_s), dist.get_rank()
    made = [(ranks, dist.new_group(ranks, timeout=patience)) for ranks in groups]
    return next((group for ranks, group in made if rank in ranks), None)


def _kind(device: str) -> str:
    return device.partition(":")[0]
