"""Gathers whole tensors from the pieces of all ranks, a few at a time."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.plugins.megatron.errors import IncompleteWeights
from offbeat.plugins.megatron.hf_files import view_box
from offbeat.plugins.megatron.mapping import ROUTER_BIAS, TensorBox, is_router_bias
from offbeat.trainers.ranks.peers import Peers
from offbeat.weight_sync.region import Region, Shape
from offbeat.weight_sync.wire_format_plugin import WireFormat

_BOXES: Final = msgspec.msgpack.Decoder(list[TensorBox])


@dataclass(frozen=True, slots=True)
class _Piece:
    box: TensorBox
    owner: int  # lowest rank that has it


class TensorGather:
    """Gathers tensors from the boxes of all ranks.

    All ranks must create one together, with their boxes.
    """

    def __init__(self, boxes: Sequence[TensorBox], peers: Peers) -> None:
        self.boxes = list(boxes)
        self._rank = peers.rank
        world = peers.all_gather(self.boxes, _BOXES)
        owned = dict[tuple[str, Region], _Piece]()
        for rank, theirs in enumerate(world):
            for box in theirs:
                owned.setdefault(box.key, _Piece(box, rank))
        self._pieces = dict[str, list[_Piece]]()
        for piece in owned.values():
            self._pieces.setdefault(piece.box.tensor, []).append(piece)
        self.shapes: dict[str, Shape] = {}
        for name in sorted(self._pieces):  # an order that does not depend on the layout
            pieces = self._pieces[name]
            self.shapes[name] = pieces[0].box.whole
            covered = sum(each.box.region.elements for each in pieces)
            if covered != prod(self.shapes[name]):
                problem = f"has {prod(self.shapes[name])} elements, the ranks hold {covered}"
                raise IncompleteWeights("this world of ranks", name, problem)

    def list_owned(self) -> list[TensorBox]:
        """Return the boxes this rank owns. Every element of the model is in one box of one rank."""
        pieces = (each for name in self.shapes for each in self._pieces[name])
        return [each.box for each in pieces if each.owner == self._rank]

    def split_aligned(self, wire_format: WireFormat) -> tuple[list[str], list[str]]:
        """Return the matrices that releases quantize, in two lists: with aligned pieces, or not.

        Pieces of the first list can be quantized separately. Equal on all ranks.
        """
        whole, cut = list[str](), list[str]()
        for name, shape in self.shapes.items():
            if wire_format.converts(name, shape):
                regions = (each.box.region for each in self._pieces[name])
                is_whole = all(wire_format.is_aligned(each, shape) for each in regions)
                (whole if is_whole else cut).append(name)
        return whole, cut

    def tensors(self, names: Sequence[str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors by name, on every rank. All ranks must pass the same names.

        Args:
            names: Hugging Face names.
            values: This rank's parameters and router biases, or tensors of their names and shapes.
                Parameters have one dtype, the biases are float32.
        """
        some = next(each for name, each in values.items() if not name.endswith(ROUTER_BIAS))
        dtypes = {name: torch.float32 if is_router_bias(name) else some.dtype for name in names}
        whole = {
            name: torch.empty(self.shapes[name], dtype=dtypes[name], device=some.device)
            for name in names
        }
        by_message = dict[tuple[int, bool], list[TensorBox]]()
        for name in names:
            for each in self._pieces[name]:
                by_message.setdefault((each.owner, is_router_bias(name)), []).append(each.box)
        for (owner, _), boxes in sorted(by_message.items(), key=lambda each: each[0]):
            sizes = [box.region.elements for box in boxes]
            flat = torch.empty(sum(sizes), dtype=dtypes[boxes[0].tensor], device=some.device)
            if owner == self._rank:
                torch.cat([view_box(values, box).reshape(-1) for box in boxes], out=flat)
            dist.broadcast(flat, src=owner)
            for box, part in zip(boxes, flat.split(sizes), strict=True):
                whole[box.tensor][box.region.slices] = part.view(box.region.shape)
        return whole

    def all_tensors(
        self, values: Mapping[str, Tensor], batch_elements: int = 1 << 26
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in order of its name, with about ``batch_elements`` in memory at a time."""
        yield from self.in_batches(list(self.shapes), values, batch_elements)

    def in_batches(
        self, names: Sequence[str], values: Mapping[str, Tensor], batch_elements: int = 1 << 26
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors in their order, with about ``batch_elements`` in memory at a time."""
        batch, elements = list[str](), 0
        for name in names:
            size = prod(self.shapes[name])
            if batch and elements + size > batch_elements:
                yield from self.tensors(batch, values).items()
                batch, elements = [], 0
            batch.append(name)
            elements += size
        if batch:
            yield from self.tensors(batch, values).items()
