"""Mistakes between the two sides of a grid, one each. Runs in workers only."""

import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_cases import TOKENS, Cut, Step
from torch import Tensor
from torch_backend.grid_jobs import ExactEncoder, ExactLanguage, feed, make
from torch_backend.torch_jobs import as_arrays
from world import COLLECTIVE_S

from offbeat.messages.failures import OffbeatError
from offbeat.messages.fences import StepKey
from offbeat.plugins.encoder_ranks.bridge import FIELDS, Bridge, Header, Kind
from offbeat.plugins.encoder_ranks.encoding import EncoderPasses
from offbeat.plugins.images.pictures import Pictures
from offbeat.trainers.ranks.peers import PeerFailed, Peers


class RepeatingBridge(Bridge):
    """Sends the features of the exchange before once more, ahead of those that are due."""

    _before: tuple[Header, Tensor] | None = None

    def send(self, header: Header, values: Tensor, rank: int) -> None:
        if header.kind is Kind.FEATURES:
            if self._before is not None:
                super().send(*self._before, rank)
            self._before = header, values.detach().clone()
        super().send(header, values, rank)


class TrustingBridge(Bridge):
    """Returns the values of the message that comes next, without a look at its key."""

    def receive(self, due: Header, rank: int) -> Tensor:
        values, exchange = list[Tensor](), 0
        while exchange < due.exchange:  # those that follow are taken off the wire, and left
            fields = torch.zeros(FIELDS, dtype=torch.int64)
            self._wire.receive(fields, rank)
            got = Header(*fields.tolist())
            values.append(torch.empty(got.shape, dtype=torch.float64))
            self._wire.receive(values[-1], rank)
            exchange = got.exchange
        assert len(astuple(due)) == FIELDS
        return values[0]


class RepeatsItself(ExactEncoder):
    def __init__(self, path: Path, **given: Any) -> None:
        super().__init__(path, **given)
        passes: Any = self.passes
        passes.exchange.bridge = RepeatingBridge(self.peers.rank, torch.device("cpu"))


class TrustsTheNextMessage(ExactLanguage):
    def __init__(self, path: Path, **given: Any) -> None:
        super().__init__(path, **given)
        passes: Any = self.passes
        passes.exchange.bridge = TrustingBridge(self.peers.rank, torch.device("cpu"))


class MergesByShape(ExactEncoder):
    """Puts pictures of several prompts end to end where shapes differ, else stacks their values."""

    class Encoder(EncoderPasses):
        def _microbatches(self, media: Any, named: Any) -> Any:
            (batch, microbatches), count = super()._microbatches(media, named)
            pictures = [Pictures.of(each) for each in batch.media]
            sizes = [each.sizes for each in pictures]
            if len(sizes) > 1 and all(np.array_equal(each, sizes[0]) for each in sizes):
                stacked = np.stack([each.values for each in pictures])
                microbatches = [Pictures(pictures[0].kind, stacked.reshape(-1), sizes[0]).media]
            return (batch, microbatches), count


ENCODERS = {each.__name__: each for each in (ExactEncoder, RepeatsItself, MergesByShape)}
LANGUAGE = {each.__name__: each for each in (ExactLanguage, TrustsTheNextMessage)}


def stepped_by(
    peers: Peers, path: Path, step: Step, encoder: str, language: str
) -> tuple[str, dict[str, Any]]:
    """Digest and weights after a step in two chunks, in a world of 1 + 1."""
    kinds = {"encoder": ENCODERS[encoder], "language": LANGUAGE[language]}
    trainer = make(peers, path, Cut(), (), 1, 1, **kinds)
    trainer.finish_train_step(feed(trainer, step, TOKENS, 2, StepKey(1, 1, 0)))
    weights = dict(trainer.iterate_weights())
    return trainer.weights_digest(), as_arrays(weights) if trainer.is_first else {}


def ended(peers: Peers, path: Path, step: Step, encoder: str) -> tuple[str, bool]:
    """The error with which a step ends in a world of 2 + 1, and whether long before the timeout."""
    trainer = make(peers, path, Cut(), (), 2, 1, encoder=ENCODERS[encoder])
    name, started = "", time.monotonic()
    try:
        feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    except (PeerFailed, OffbeatError, RuntimeError) as error:
        name = type(error).__name__
    return name, time.monotonic() - started < COLLECTIVE_S / 2
