"""Account of a plan: what moves, what has to move at least, and who is busiest. Pure."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from offbeat.weight_sync.region import PlacedTensor, Placement, Region, Shape, union_elements
from offbeat.weight_sync.transfer_plan import DIRECT, RankMachines, TransferPlan

Link = Literal["network", "machine", "shared copy"]


@dataclass(frozen=True, slots=True)
class ByteAccount:
    """Bytes of a plan by class of tensor and by link, and the load of the ranks."""

    moved: dict[tuple[str, Link], int]
    """Bytes by (class, link). ``shared copy``: a receiver reads them from another's copy on its machine."""

    needed: int
    """Bytes that machines of receivers need and have no sender of: no plan moves less."""

    held: tuple[int, ...]  # by sender, on the wire
    sent: tuple[int, ...]  # over the network, by sender
    received: tuple[int, ...]  # over the network, by receiver
    model: int  # bytes of the model once

    @property
    def over_network(self) -> int:
        return sum(nbytes for (_, link), nbytes in self.moved.items() if link == "network")

    @property
    def ratio(self) -> float:
        """Bytes over the network for each byte that has to cross it; 1.0 is the optimum."""
        return self.over_network / self.needed if self.needed else 1.0

    @property
    def busiest(self) -> int:
        """Bytes that the busiest sender sends over the network."""
        return max(self.sent, default=0)


def account(plan: TransferPlan) -> ByteAccount:
    """Add up a plan."""
    senders, receivers = plan.machines.senders, plan.machines.receivers
    moved = Counter[tuple[str, Link]]()
    sent, received = [0] * len(senders), [0] * len(receivers)
    for piece, sender, receiver, via in plan.transfers():
        link: Link = "shared copy"
        if via == DIRECT:
            link = "machine" if senders[sender] == receivers[receiver] else "network"
        if link == "network":
            sent[sender] += piece.nbytes
            received[receiver] += piece.nbytes
        moved[plan.tensors[piece.tensor].kind, link] += piece.nbytes
    model = sum(each.nbytes for each in plan.tensors)
    held = _held(plan)
    return ByteAccount(dict(moved), _needed(plan), held, tuple(sent), tuple(received), model)


def _held(plan: TransferPlan) -> tuple[int, ...]:
    elements, held = dict[tuple[Placement, int], int](), [0] * len(plan.machines.senders)
    for each in plan.tensors:
        key = each.source, each.itemsize
        elements[key] = elements.get(key, 0) + 1
    for (placement, itemsize), count in elements.items():
        for region, ranks in placement.parts:
            for rank in ranks:
                held[rank] += region.elements * itemsize * count
    return tuple(held)


def _needed(plan: TransferPlan) -> int:
    """Count, from the placements and not from the transfers, what machines need and do not have."""
    elements = dict[tuple[Placement, Placement, Shape], int]()
    total = 0
    for each in plan.tensors:
        key = each.source, each.target, each.shape
        if key not in elements:
            elements[key] = _elements_needed(each, plan.machines)
        total += elements[key] * each.itemsize
    return total


def _elements_needed(tensor: PlacedTensor, machines: RankMachines) -> int:
    needed = dict[int, set[Region]]()
    for region, ranks in tensor.target.parts:
        for machine in {machines.receivers[rank] for rank in ranks}:
            needed.setdefault(machine, set()).add(region)
    held = dict[int, set[Region]]()
    for region, ranks in tensor.source.parts:
        for machine in {machines.senders[rank] for rank in ranks} & needed.keys():
            held.setdefault(machine, set()).add(region)
    return sum(
        union_elements([*regions, *held.get(machine, ())]) - union_elements(held.get(machine, ()))
        for machine, regions in needed.items()
    )
