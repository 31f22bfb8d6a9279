"""Base of the trainers of both sides of a grid, of any backend: rounds of messages about media."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import torch

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.messages.training import StepResult
from offbeat.plugins.encoder_ranks.bridge import Bridge, Header, Kind, Traffic
from offbeat.plugins.encoder_ranks.layout import Grid, side_grid
from offbeat.plugins.encoder_ranks.provenance import list_digest
from offbeat.plugins.encoder_ranks.tower_plan import SETTING
from offbeat.plugins.tensor_ranks.tensor_proof import check_copies
from offbeat.trainers.model_trainer import ModelTrainer
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


class ExchangingTrainer(ModelTrainer):
    """Trainer of a rank that exchanges features of media with ranks of the other side."""

    _grid: Grid
    _bridge: Bridge
    _exchanges: int  # of this world so far; aborted ones count
    _trains_tower: bool  # whether gradients of features are sent back

    def _join_grid(self, trainer: ModelTrainerConfig) -> None:
        """Find this rank's place in the grid, before the first exchange."""
        self._grid, self._exchanges = side_grid(trainer), 0
        self._bridge = Bridge(self.peers.rank, torch.device(trainer.device))

    def _begin(self, loss: LossSpec) -> None:
        self._bridge.traffic = Traffic()
        super()._begin(loss)

    def _finish(self) -> StepResult:
        result = super()._finish()
        traffic = self._bridge.traffic
        seen = self.peers.all_gather((traffic.nbytes, traffic.seconds), _TRAFFIC)
        named = {
            "train/bridge_bytes": float(sum(nbytes for nbytes, _ in seen)),
            "train/bridge_s": max(seconds for _, seconds in seen),
        }
        return msgspec.structs.replace(result, metrics={**result.metrics, **named})

    def _pass_on_all_ranks(self, during: str, work: Callable[[], T]) -> T:
        """Run passes of this rank's side, while the other side waits; either all continue or none.

        A side of one rank reports its error, and all ranks end the call together. On a side of several
        the others may be inside a collective that the failed rank never enters. It raises without a
        report, for which they could not answer: so its own error is what the controller receives, at
        once, in place of the timeouts of the others.
        """
        side = self._grid.side_of(self.peers.rank)
        if len(self._grid.ranks_of(side)) == 1:
            return run_on_all_ranks(self.peers, during, work)
        made = work()
        self._wait_for_all(during)
        return made

    def _wait_for_all(self, during: str) -> None:
        """Wait until all ranks have done what ``during`` names; ``PeerFailed`` if one cannot.

        Ranks that fail or succeed in ``run_on_all_ranks`` take part: it reduces one number, too.
        """
        all_reduce_max_or_fail(self.peers, during, [0], None)

    def _named_by_lanes(self, digests: Sequence[str]) -> list[list[str]]:
        """Return the digests of the media that each lane reads; begin an exchange."""
        self._exchanges += 1
        named = self.peers.all_gather(list(digests), _NAMES)
        return [named[self._grid.receiver_of(lane)] for lane in range(self._grid.data)]

    def _header(self, kind: Kind, lane: int, named: Sequence[Sequence[str]]) -> Header:
        """Return the header of a lane's message, without the shape and dtype of its values."""
        provenance = list_digest(named[lane])
        step = self.steps_applied + 1
        return Header(self._exchanges, step, kind, lane, provenance, 0, 0, 0, 0)
