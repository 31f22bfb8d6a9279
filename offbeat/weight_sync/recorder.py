"""Records where an engine's own loader puts each region of each checkpoint tensor.

Only the engine's ``load_weights`` defines a rank's needs, because it fuses, cuts and skips tensors.
So the loader runs once over tensors without memory. The recorder intercepts every copy into a
parameter and performs none of them. A view of a tensor without memory keeps storage, offset, shape
and strides. These tell which box of a checkpoint tensor becomes which elements of a parameter.

    bulk    a box that is copied unchanged, or cast: a sender may send only this box
    misc    any other use of a tensor: arithmetic, packing, a shape that is not a box. The whole
            tensor is one more region of the same fetch, and goes through the engine's own loader

The recording also proves coverage. Each element of each parameter must be written exactly once,
unless it is on a list of elements that the engine itself fills, ties or computes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# torch declares the interface of dispatch modes without types.

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat.weight_sync.errors import LayoutNotRecorded
from offbeat.weight_sync.region import Region, Shape

_ATEN: Final = torch.ops.aten
_FILLS: Final = frozenset({_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default})

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]


class ParameterPlace(NamedTuple):
    """Elements of a parameter, described by arguments of ``torch.as_strided``."""

    parameter: str
    shape: Shape
    stride: Shape  # elements of the parameter from one element of an axis to the next
    offset: int  # of the first element, from the start of the parameter

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return a view of these elements."""
        whole = parameters[self.parameter].detach()
        start = whole.storage_offset() + self.offset
        return whole.as_strided(self.shape, self.stride, start)


class RecordedCopy(NamedTuple):
    """Box of a checkpoint tensor, and the elements of a parameter that it becomes."""

    tensor: str
    region: Region
    place: ParameterPlace  # of the region's shape, axis by axis


@dataclass(frozen=True)
class EngineRecording:
    """Layout of one engine rank: the boxes of a checkpoint that it needs, and where they go."""

    copies: tuple[RecordedCopy, ...]
    misc: Mapping[str, str]  # tensors that go whole through the loader, with the reason
    unused: tuple[str, ...]  # tensors that this rank does not use
    parameters: Mapping[str, tuple[Shape, torch.dtype]]
    """Shape and dtype of every parameter before loading."""

    def regions(self) -> Iterator[tuple[str, Region]]:
        """Yield every box that is sent to this rank, except tensors that are sent as a whole."""
        yield from dict.fromkeys((each.tensor, each.region) for each in self.copies)

    def write(
        self, tensor: str, region: Region, values: Tensor, into: Mapping[str, Tensor]
    ) -> None:
        """Copy a received box to all elements that it becomes, cast as the loader casts it."""
        with torch.no_grad():
            for each in self.copies:
                if (each.tensor, each.region) == (tensor, region):
                    each.place.of(into).copy_(values)


def record(
    load: Loader,
    parameters: Mapping[str, Tensor],
    checkpoint: Mapping[str, tuple[Shape, torch.dtype]],
    *,
    unloaded: Iterable[str] = (),
) -> EngineRecording:
    """Record one run of a loader. The parameters do not change.

    Args:
        load: The engine's own ``load_weights``.
        parameters: Parameters and checkpointed buffers by name, with memory or without.
        checkpoint: Shape and dtype of every tensor of a checkpoint, by name.
        unloaded: Parameters that no checkpoint fills, because the engine computes or ties them.

    Raises:
        LayoutNotRecorded: An element of a parameter is never written, or written twice, or written
            by an operation that is not a copy.
    """
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in checkpoint.items()
    }
    mode = _Recorder(sources, parameters)
    with torch.no_grad(), mode:
        load(sources.items())
    misc = mode.misc
    written = {name: _Coverage(tensor) for name, tensor in mode.parameters.items()}
    for place in mode.filled:
        written[place.parameter].filled.append(place)
    for place in mode.places:
        written[place.parameter].copied.append(place)
    exempt = set(unloaded)
    for name, each in written.items():
        if name not in exempt:
            each.check(name)
    copies = tuple(each for each in mode.copies if each.tensor not in misc)
    used = {each.tensor for each in copies} | misc.keys()
    unused = tuple(name for name in checkpoint if name not in used)
    forms = {name: (tuple(each.shape), each.dtype) for name, each in mode.parameters.items()}
    return EngineRecording(copies, misc, unused, forms)


class _Recorder(TorchDispatchMode):
    """Sees each operation of a loader. Records copies into parameters without performing them."""

    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.copies = list[RecordedCopy]()
        self.places = list[ParameterPlace]()  # of every copy, from any source
        self.filled = list[ParameterPlace]()
        self.misc = dict[str, str]()
        self.parameters = dict[str, Tensor]()
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._targets = dict[int, str]()
        for name, tensor in parameters.items():  # tied names count as one, under the first name
            if self._targets.setdefault(_storage(tensor), name) == name:
                self.parameters[name] = tensor
        self._derived = dict[int, tuple[set[str], Tensor]]()  # new tensors with their origins

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- as torch declares it
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is not None and func._schema.is_mutable and _storage(target) in self._targets:  # noqa: SLF001
            self._written(func, target, args)
            return target
        made = func(*args, **kwargs)
        origins = self._origins((args, kwargs))
        for each in tree_leaves(made):
            if origins and isinstance(each, Tensor) and not self._origins(each):
                # Keep it alive, so that no other tensor reuses its storage's address.
                self._derived[_storage(each)] = origins, each
                self.misc |= dict.fromkeys(origins - self.misc.keys(), f"{func} makes a new tensor")
        return made

    def _written(self, func: Any, target: Tensor, args: Any) -> None:  # noqa: ANN401
        name = self._targets[_storage(target)]
        place = _place(name, target, self.parameters[name])
        if func in _FILLS:
            self.filled.append(place)
            return
        if func is not _ATEN.copy_.default:
            raise LayoutNotRecorded(name, f"is written by {func}, which is not a copy")
        self.places.append(place)
        source = args[1]
        found = self._sources.get(_storage(source))
        if found is None:
            if not self._origins(source):
                raise LayoutNotRecorded(
                    name, "is copied from something that is not a checkpoint tensor"
                )
            return  # misc already
        tensor, whole = found
        copy = _as_box(tensor, source.expand(target.shape), whole, place)
        if copy is None:
            self.misc.setdefault(
                tensor, f"{tuple(source.shape)} of {tuple(whole.shape)} is not a box"
            )
        else:
            self.copies.append(copy)

    def _origins(self, values: Any) -> set[str]:  # noqa: ANN401 -- arguments of any operation
        found = set[str]()
        for each in tree_leaves(values):
            if isinstance(each, Tensor):
                key = _storage(each)
                if key in self._sources:
                    found.add(self._sources[key][0])
                elif key in self._derived:
                    found |= self._derived[key][0]
        return found


class _Coverage:
    """Counts how often the elements of one parameter are written."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tuple(tensor.shape)
        self.copied, self.filled = list[ParameterPlace](), list[ParameterPlace]()

    def check(self, name: str) -> None:
        """Check that each element is either copied once, or filled and never copied."""
        counts = torch.zeros(self._shape, dtype=torch.int32)
        for place in self.copied:
            place.of({name: counts}).add_(1)
        if twice := int((counts > 1).sum()):
            raise LayoutNotRecorded(name, f"has {twice} elements that are written more than once")
        for place in self.filled:
            place.of({name: counts}).fill_(1)
        if missing := int((counts == 0).sum()):
            raise LayoutNotRecorded(name, f"has {missing} elements that nothing writes")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 -- only address of a meta tensor


def _place(name: str, view: Tensor, parameter: Tensor) -> ParameterPlace:
    if not parameter.is_contiguous():
        raise LayoutNotRecorded(name, "is not contiguous")
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    return ParameterPlace(name, tuple(view.shape), view.stride(), offset)


def _as_box(name: str, view: Tensor, whole: Tensor, place: ParameterPlace) -> RecordedCopy | None:
    """Return a copy as a box of the whole tensor, axis by axis, or None if it is not a box."""
    start, left = list[int](), view.storage_offset()
    for stride, size in zip(whole.stride(), whole.shape, strict=True):
        start.append(min(left // stride, size - 1) if stride else 0)
        left -= start[-1] * stride
    axes = [axis for axis, size in enumerate(view.shape) if size > 1]
    by_stride = {view.stride(axis): axis for axis in axes}
    if left or len(by_stride) != len(axes):
        return None
    shape, strides = list[int](), list[int]()
    for stride, size in zip(whole.stride(), whole.shape, strict=True):
        axis = by_stride.pop(stride, None) if size > 1 else None
        shape.append(1 if axis is None else view.shape[axis])
        strides.append(0 if axis is None else place.stride[axis])
    region = Region.at(tuple(start), tuple(shape))
    if by_stride or not Region.whole(tuple(whole.shape)).contains(region):
        return None
    at = ParameterPlace(place.parameter, tuple(shape), tuple(strides), place.offset)
    return RecordedCopy(name, region, at)
