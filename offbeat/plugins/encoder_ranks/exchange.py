"""Rounds of messages about media between the sides of a grid, of any backend."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import torch

from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.plugins.encoder_ranks.bridge import Bridge, Header, Kind, Traffic
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.provenance import list_digest
from offbeat.plugins.encoder_ranks.tower_plan import SETTING
from offbeat.plugins.tensor_ranks.tensor_proof import check_copies
from offbeat.trainers.ranks.peers import Peers, all_reduce_max_or_fail, run_on_all_ranks

T = TypeVar("T")
_NAMES: Final = msgspec.msgpack.Decoder(list[str])
_TRAFFIC: Final = msgspec.msgpack.Decoder(tuple[int, float])


def prove_sides(peers: Peers, model: str, prove: Callable[[], tuple[float, str]]) -> None:
    """Prove what the ranks of both sides have cut. All of them call it together.

    Args:
        peers: The ranks of the world.
        model: Name of the model's class.
        prove: Proves what this rank holds; returns what ``copies_gap`` does.

    Raises:
        UntrainableModel: Ranks compute something else than the whole model; on all ranks.
    """
    apart = run_on_all_ranks(peers, "the proof of the cut", prove)
    check_copies(model, apart, peers, f"trainer.tensor_parallel or {SETTING}")


class Exchange:
    """Rounds of messages of one rank about media, with the ranks of the other side."""

    def __init__(
        self, trainer: ModelTrainerConfig, peers: Peers, next_step: Callable[[], int]
    ) -> None:
        """Send nothing yet.

        Args:
            trainer: Section of the recipe.
            peers: The ranks of the world, of both sides.
            next_step: Returns the number of the next step, which messages name.
        """
        self.peers, self.grid = peers, side_grid(trainer)
        self.bridge = Bridge(peers.rank, torch.device(trainer.device))
        self._next_step = next_step
        self._count = 0  # exchanges of this world so far; aborted ones count

    def begin_step(self) -> None:
        """Count the traffic of a step from here on."""
        self.bridge.traffic = Traffic()

    def measure(self) -> dict[str, float]:
        """Return metrics of the traffic of a step; all ranks call it together."""
        traffic = self.bridge.traffic
        seen = self.peers.all_gather((traffic.nbytes, traffic.seconds), _TRAFFIC)
        return {
            "train/bridge_bytes": float(sum(nbytes for nbytes, _ in seen)),
            "train/bridge_s": max(seconds for _, seconds in seen),
        }

    def pass_on_all_ranks(self, during: str, work: Callable[[], T]) -> T:
        """Run passes of this rank's side, while the other side waits; either all continue or none.

        A side of one rank reports its error, and all ranks end the call together. On a side of several
        the others may be inside a collective that the failed rank never enters. It raises without a
        report, for which they could not answer: so its own error is what the controller receives, at
        once, in place of the timeouts of the others.
        """
        side = self.grid.side_of(self.peers.rank)
        if len(self.grid.ranks_of(side)) == 1:
            return run_on_all_ranks(self.peers, during, work)
        made = work()
        self.wait_for_all(during)
        return made

    def wait_for_all(self, during: str) -> None:
        """Wait until all ranks have done what ``during`` names; ``PeerFailed`` if one cannot.

        Ranks that fail or succeed in ``run_on_all_ranks`` take part: it reduces one number, too.
        """
        all_reduce_max_or_fail(self.peers, during, [0], None)

    def name_media(self, digests: Sequence[str]) -> list[list[str]]:
        """Return the digests of the media that each lane reads; begin an exchange."""
        self._count += 1
        named = self.peers.all_gather(list(digests), _NAMES)
        return [named[self.grid.receiver_of(lane)] for lane in range(self.grid.data)]

    def header(self, kind: Kind, lane: int, named: Sequence[Sequence[str]]) -> Header:
        """Return the header of a lane's message, without the shape and dtype of its values."""
        provenance = list_digest(named[lane])
        return Header(self._count, self._next_step(), kind, lane, provenance, 0, 0, 0, 0)
