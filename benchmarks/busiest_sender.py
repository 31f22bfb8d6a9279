"""The least that the busiest sender of a plan could send, by maximum flow.

An oracle for the plan's assignment: pieces are divided between their holders at will, which no plan
does, so it is a lower bound.
"""

from collections import Counter

import networkx as nx

from offbeat.weight_sync.region import Placement, Ranks, Region
from offbeat.weight_sync.transfer_plan import DIRECT, TransferPlan


def optimal_busiest(plan: TransferPlan, tolerance: float = 0.0) -> int:
    """Return the smallest load of the busiest sender in bytes, to a relative ``tolerance``."""
    demand, known = Counter[Ranks](), dict[tuple[Placement, Region], Ranks]()
    for piece, _, _, via in plan.transfers():
        if via == DIRECT:
            key = plan.tensors[piece.tensor].source, piece.region
            if key not in known:
                known[key] = _holders(*key)
            demand[known[key]] += piece.nbytes
    total = sum(demand.values())
    low, high = total // len(plan.machines.senders), total
    while high - low > max(1, low * tolerance):
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(demand, middle) else (middle, high)
    return high


def _holders(source: Placement, region: Region) -> Ranks:
    return next(ranks for held, ranks in source.parts if held.contains(region))


def _fits(demand: Counter[Ranks], most: int) -> bool:
    graph = nx.DiGraph()
    for holders, nbytes in demand.items():
        graph.add_edge("all", holders, capacity=nbytes)
        for rank in holders:
            graph.add_edge(holders, rank)
            graph.add_edge(rank, "sent", capacity=most)
    return nx.maximum_flow_value(graph, "all", "sent") == sum(demand.values())
