"""Deals the groups of a step to the ranks of a sweep point and to its minibatches."""

from collections.abc import Sequence

from offbeat.config.run import RunConfig
from offbeat.controller.minibatches import MinibatchAssigner
from offbeat.planning.fabricated import FabricatedGroup, tokens_of
from offbeat.trainers.ranks.dispatch import Replicas, minibatch_shares


def share_of_minibatches(
    groups: Sequence[FabricatedGroup], config: RunConfig, replicas: Replicas, rank: int
) -> tuple[list[int], list[int]]:
    """Return the indices of a rank's groups, and the minibatch of each, as a run assigns them."""
    numbers = range(len(groups))
    drawn = MinibatchAssigner(config.algorithm.minibatches, config.seed, 1).of(numbers)
    minibatches = drawn or (0,) * len(groups)
    assigned = minibatch_shares(
        dict(enumerate(map(tokens_of, groups))), dict(enumerate(minibatches)), replicas.data
    )
    own = list(assigned[replicas.share_of(rank)])
    return own, [minibatches[at] for at in own]
