"""Messages between a sweep and the ranks of a point, and their shares. Loads no tensors."""

import os
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from offbeat.config.run import RunConfig
from offbeat.controller.train_step import MinibatchAssigner
from offbeat.messages.parent_death import die_with_parent
from offbeat.plugins.planning.fabricated import FabricatedGroup, LengthLaw, count_tokens, fabricate
from offbeat.trainers.ranks.dispatch import Replicas, minibatch_shares
from offbeat.trainers.spec import WorldRendezvous

HOST: Final = "127.0.0.1"


class RankTask(msgspec.Struct, frozen=True):
    """The work of one rank of a point."""

    config_json: str  # of a ``RunConfig``
    law: LengthLaw
    steps: int  # timed ones
    memory_mib: int | None  # memory that a rank may allocate beyond its libraries; None: no limit
    rank: int
    replicas: Replicas
    at: WorldRendezvous | None  # None: one rank


class RankResult(msgspec.Struct, frozen=True, tag=True):
    """Measurements of one rank."""

    parameters: int
    step_s: float  # median of the timed steps
    tokens: int  # of one step over all ranks, prompts counted once per sample
    peak_mib: float  # highest in any phase, beyond what the process held before it loaded
    phases_mib: dict[str, float]  # by phase
    phases_s: dict[str, float]  # by phase; medians of the timed steps


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The error of a rank that could not measure."""

    out_of_memory: bool
    error: str


TASK: Final = msgspec.msgpack.Decoder(RankTask)
REPLY: Final = msgspec.msgpack.Decoder[RankResult | RankFailed](RankResult | RankFailed)


def receive_task(parent_pid: int) -> RankTask:
    """Read this rank's task from standard input. From now on the rank ends with its sweep.

    Args:
        parent_pid: Process of the sweep. A rank that outlived it would slow down the next sweep.
    """
    die_with_parent(parent_pid)
    return TASK.decode(sys.stdin.buffer.read())


def reply_on(descriptor: int, reply: RankResult | RankFailed) -> None:
    """Write the reply of a rank and close the descriptor."""
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(reply))


def fabricate_step(law: LengthLaw, config: RunConfig, vocabulary: int) -> list[FabricatedGroup]:
    """Return all groups of a step of the recipe."""
    groups, samples = config.groups_per_step, config.samples_per_group
    return fabricate(law, groups, samples, vocabulary, config.seed)


def share_of_minibatches(
    groups: Sequence[FabricatedGroup], config: RunConfig, replicas: Replicas, rank: int
) -> tuple[list[int], list[int]]:
    """Return the indices of a rank's groups, and the minibatch of each, as a run assigns them."""
    numbers = range(len(groups))
    drawn = MinibatchAssigner(config.algorithm.minibatches, config.seed, 1).of(numbers)
    minibatches = drawn or (0,) * len(groups)
    assigned = minibatch_shares(
        dict(enumerate(map(count_tokens, groups))), dict(enumerate(minibatches)), replicas.data
    )
    own = list(assigned[replicas.find_share(rank)])
    return own, [minibatches[at] for at in own]
