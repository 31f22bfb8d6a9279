"""Plans a sync: the sender and receivers of every region of every tensor. Pure.

Every tensor is cut at the borders of both sides, so that each piece lies completely inside or
outside any region that a rank holds or needs. Each needed piece is then sent by one of its holders,
once to each receiver, or once to each machine that has receivers. Each piece is assigned to its
least loaded holder. Pieces with few holders are assigned first, and large pieces before small ones.
Pieces that many ranks hold come last and even out the load.

Every rank computes the same plan from the same two layouts. Before the first byte is sent, the
ranks compare digests of their plans.
"""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Final, NamedTuple

import msgspec
import xxhash

from offbeat.weight_sync.errors import PlanHasHole
from offbeat.weight_sync.region import PlacedTensor, Placement, Ranks, Region, Shape

DIRECT: Final = -1
"""``Transfer.via`` for bytes that come directly from the sender."""


class TensorPiece(NamedTuple):
    """Region of a tensor that is sent in one piece."""

    tensor: int  # index in the plan's tensors
    region: Region
    nbytes: int


class Transfer(NamedTuple):
    """Transfer of one piece to one receiver."""

    piece: TensorPiece
    sender: int
    receiver: int
    via: int = DIRECT
    """Receiver on the same machine that gets the piece from the sender and shares its copy."""


@dataclass(frozen=True, slots=True)
class RankMachines:
    """Machine numbers of every sender and every receiver."""

    senders: Sequence[int]
    receivers: Sequence[int]

    @classmethod
    def of_size(cls, senders: int, receivers: int, per_machine: int) -> "RankMachines":
        """Return machines with ``per_machine`` ranks each. No machine has ranks of both sides."""
        first = -(-senders // per_machine)
        return cls(
            [rank // per_machine for rank in range(senders)],
            [first + rank // per_machine for rank in range(receivers)],
        )


@dataclass(frozen=True)
class TransferPlan:
    """All transfers of a sync, in each sender's sending order."""

    tensors: tuple[PlacedTensor, ...]
    machines: RankMachines
    pieces: tuple[TensorPiece, ...]
    _piece: "array[int]"
    _sender: "array[int]"
    _receiver: "array[int]"
    _via: "array[int]"

    def __len__(self) -> int:
        return len(self._piece)

    def transfers(self) -> Iterator[Transfer]:
        """Yield every transfer, in the order of the tensors."""
        columns = zip(self._piece, self._sender, self._receiver, self._via, strict=True)
        for piece, sender, receiver, via in columns:
            yield Transfer(self.pieces[piece], sender, receiver, via)

    @cached_property
    def digest(self) -> str:
        """Digest of everything on which ranks must agree before the first byte."""
        found = xxhash.xxh3_128()
        for each in self.tensors:
            found.update(msgspec.msgpack.encode((each.name, each.shape, each.itemsize)))
        found.update(msgspec.msgpack.encode(self.pieces))
        for column in (self._piece, self._sender, self._receiver, self._via):
            found.update(column.tobytes())
        return found.hexdigest()


def plan_transfers(
    tensors: Sequence[PlacedTensor], machines: RankMachines, *, max_piece_bytes: int
) -> TransferPlan:
    """Plan the sync of ``tensors``, given in sending order.

    Args:
        tensors: Every tensor of the model with its placement on both sides.
        machines: Machines of the ranks. Receivers on one machine share one copy of common pieces.
        max_piece_bytes: Maximum size of pieces that may be split. So several holders can share the
            sending of a large piece.

    Raises:
        PlanHasHole: A receiver needs a region that no sender holds.
    """
    planner = _Planner(machines)
    pieces, holders = list[TensorPiece](), list[tuple[Ranks, Ranks]]()
    for index, each in enumerate(tensors):
        for region, nbytes, ends in planner.parts(each, max_piece_bytes):
            pieces.append(TensorPiece(index, region, nbytes))
            holders.append(ends)
    order = sorted(range(len(pieces)), key=lambda at: (len(holders[at][0]), -pieces[at].nbytes, at))
    routes = dict[int, list[tuple[int, int, int]]]()
    for at in order:
        routes[at] = planner.routes(pieces[at].nbytes, *holders[at])
    columns = [array("q") for _ in range(4)]
    for at in range(len(pieces)):
        columns[0].extend([at] * len(routes[at]))
        for column, values in zip(columns[1:], zip(*routes[at], strict=True), strict=True):
            column.extend(values)
    return TransferPlan(tuple(tensors), machines, tuple(pieces), *columns)


_Part = tuple[Region, int, tuple[Ranks, Ranks]]
"""A piece of a tensor: region, bytes, the ranks that hold it, and the ranks that need it."""


class _Planner:
    """Assigns senders. Counts the bytes that each rank has to send or receive so far."""

    def __init__(self, machines: RankMachines) -> None:
        self._machines = machines
        self._shared = set(machines.senders) & set(machines.receivers)
        self._sent = [0] * len(machines.senders)
        self._received = [0] * len(machines.receivers)
        self._parts = dict[tuple[Placement, Placement, Shape, int, bool], list[_Part]]()
        self._heads = dict[Ranks, list[Ranks]]()

    def parts(self, tensor: PlacedTensor, max_bytes: int) -> list[_Part]:
        """Return the needed pieces of a tensor. Tensors with equal placements share the list."""
        key = tensor.source, tensor.target, tensor.shape, tensor.itemsize, tensor.split
        if key not in self._parts:
            most = max_bytes // tensor.itemsize
            self._parts[key] = [
                (part, part.elements * tensor.itemsize, (held_by, needed_by))
                for region, held_by, needed_by in _atoms(tensor)
                for part in (region.slice_rows(most) if tensor.split else [region])
            ]
        return self._parts[key]

    def routes(self, nbytes: int, holders: Ranks, receivers: Ranks) -> list[tuple[int, int, int]]:
        """Return (sender, receiver, via) for every receiver of one piece."""
        found = list[tuple[int, int, int]]()
        least = [(self._sent[rank], rank) for rank in holders]
        heapq.heapify(least)
        received = self._received
        for together in self._by_machine(receivers):
            head = min(together, key=received.__getitem__)
            near = self._near(holders, head) if self._shared else ()
            if near:  # inside the machine, so no load on its network
                sender = near[0]
            else:
                load, sender = least[0]
                heapq.heapreplace(least, (load + nbytes, sender))
                self._sent[sender] = load + nbytes
            received[head] += nbytes
            found.append((sender, head, DIRECT))
            if len(together) > 1:
                found += [(sender, each, head) for each in together if each != head]
        return found

    def _by_machine(self, receivers: Ranks) -> list[Ranks]:
        if receivers not in self._heads:
            groups = dict[int, list[int]]()
            for rank in receivers:
                groups.setdefault(self._machines.receivers[rank], []).append(rank)
            self._heads[receivers] = [tuple(each) for each in groups.values()]
        return self._heads[receivers]

    def _near(self, holders: Ranks, receiver: int) -> list[int]:
        """Return the holders on the machine of a receiver."""
        machine = self._machines.receivers[receiver]
        if machine not in self._shared:
            return []
        return [rank for rank in holders if self._machines.senders[rank] == machine]


def _atoms(tensor: PlacedTensor) -> Iterator[tuple[Region, Ranks, Ranks]]:
    """Cut a tensor at the borders of both sides and yield the needed cells."""
    cuts = [{0, size} for size in tensor.shape]
    for region, _ in (*tensor.source.parts, *tensor.target.parts):
        if region.elements:
            for axis, ends in enumerate(zip(region.start, region.stop, strict=True)):
                cuts[axis].update(ends)
    axes = [sorted(each) for each in cuts]
    held, needed = (_cells(axes, side) for side in (tensor.source, tensor.target))
    spans = [list(pairwise(axis)) for axis in axes]
    for cell in sorted(needed):
        ends = [spans[axis][at] for axis, at in enumerate(cell)]
        region = Region(tuple(start for start, _ in ends), tuple(stop for _, stop in ends))
        if cell not in held:
            raise PlanHasHole(tensor.name, str(region), needed[cell])
        yield region, held[cell], needed[cell]


def _cells(axes: list[list[int]], placement: Placement) -> dict[tuple[int, ...], Ranks]:
    """Return the ranks, in ascending order, of every cell that a part of the placement covers."""
    numbers = [{cut: at for at, cut in enumerate(axis)} for axis in axes]
    covered = dict[tuple[int, ...], set[int]]()
    for region, ranks in placement.parts:
        if not region.elements:
            continue
        ends = zip(numbers, region.start, region.stop, strict=True)
        for cell in product(*(range(at[start], at[stop]) for at, start, stop in ends)):
            covered.setdefault(cell, set()).update(ranks)
    return {cell: tuple(sorted(ranks)) for cell, ranks in covered.items()}
