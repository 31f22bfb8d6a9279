"""Base of the trainers of language ranks, of any backend: features come, their gradients go back."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from offbeat.messages.media import Media
from offbeat.models.media_canaries import canary_media
from offbeat.models.media_passes import Features
from offbeat.plugins.encoder_ranks.bridge import Kind, gradient_dtype, shared_values
from offbeat.plugins.encoder_ranks.exchange import ExchangingTrainer
from offbeat.plugins.encoder_ranks.provenance import digest_of, media_read
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.model_trainer import LossOf
from offbeat.trainers.ranks.peers import run_on_all_ranks


class LaneFeatures:
    """Features of the media of one exchange, by their content.

    ``leaf`` [blocks, F, H] adds up the gradients of all microbatches that read them, in float32 at
    least; None without media.
    """

    def __init__(self, counts: dict[str, int], values: Tensor | None, *, trained: bool) -> None:
        """``counts``: number of features of the media of each digest, in the order of ``values``."""
        ends = np.cumsum(list(counts.values())).tolist()
        self._spans = {
            digest: slice(end - count, end)
            for (digest, count), end in zip(counts.items(), ends, strict=True)
        }
        self.leaf = values
        if values is not None and trained:
            self.leaf = values.to(gradient_dtype(values.dtype)).requires_grad_()

    def of(self, media: tuple[Media, ...]) -> Features:
        """Return the features of media, in their order."""
        assert self.leaf is not None  # noqa: S101 -- a lane with media has received some
        parts = [self.leaf[:, self._spans[digest_of(each)]] for each in media]
        embedded_FH, *deep = torch.cat(parts, dim=1).unbind()
        return Features(embedded_FH, tuple(deep))

    @property
    def gradient(self) -> Tensor | None:
        """Return the gradients that were added up; zeros if no pass read a feature."""
        if self.leaf is None or self.leaf.grad is not None:
            return None if self.leaf is None else self.leaf.grad
        return torch.zeros_like(self.leaf)


class LaneTrainer(ExchangingTrainer):
    """Trainer of one rank of the language model, which computes no tower."""

    _received: LaneFeatures | None  # of the open exchange; None outside of one
    _lane_group: dist.ProcessGroup | None
    """The ranks of a lane that read the same features; None: this rank reads alone, or none."""

    def _top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        asked = canary_media(self.media_rules, prompts)
        with self._exchanged([each for each in asked if each is not None], trained=False):
            return super()._top_logprobs(prompts, count)

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        self._model_of(name)  # loaded before the exchange, on all ranks
        with self._exchanged(media_read(microbatches), trained=False):
            return super()._logprobs(name, count, microbatches, temperature)

    @contextmanager
    def _exchanged(self, media: Sequence[Media], *, trained: bool) -> Generator[bool]:
        """Receive the features that the passes inside the block read; then send their gradients.

        All ranks of the world enter together. The value is whether gradients are sent by any lane, and
        the passes have to end on all ranks before they are.
        """
        self._use(None)
        counts = {digest_of(each): self.media_rules.count_features(each) for each in media}
        named = self._named_by_lanes(list(counts))
        if not any(named):
            yield False
            return
        for during in ("the media", "the tower"):
            self._wait_for_all(during)
        values = run_on_all_ranks(
            self.peers, "the features", lambda: self._received_values(counts, named)
        )
        received = LaneFeatures(counts, self._shared(counts, values), trained=trained)
        self._use(received)
        try:
            yield trained
        finally:
            self._use(None)
        if not trained:
            return
        if (gradient := received.gradient) is not None:
            self._send_back(gradient, named)
        for during in ("the gradients", "the tower's backward"):
            self._wait_for_all(during)

    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        with self._exchanged(media_read(microbatches), trained=self._trains_tower) as agree:
            add = super()._add_gradients
            if not agree:
                add(microbatches, loss_of, temperature)
                return
            # A failure is named here: encoder ranks would wait for gradients until their timeout.
            self._pass_on_all_ranks("microbatch", lambda: add(microbatches, loss_of, temperature))

    @property
    def _is_receiver(self) -> bool:
        """Return whether this rank exchanges messages for its lane."""
        rank = self.peers.rank
        return rank == self._grid.receiver_of(self._grid.share_of(rank))

    def _use(self, received: LaneFeatures | None) -> None:
        """Let passes read these features; None: passes that follow read no pictures."""
        self._received = received

    def _received_values(
        self, counts: dict[str, int], named: Sequence[Sequence[str]]
    ) -> Tensor | None:
        """Return the features [blocks, F, H] of this rank's lane, as they come.

        None without any, and on a rank that exchanges no messages.
        """
        if not counts or not self._is_receiver:
            return None
        lane = self._grid.share_of(self.peers.rank)
        due = replace(self._header(Kind.FEATURES, lane, named), features=sum(counts.values()))
        return self._bridge.receive(due, self._grid.encoder_of(lane))

    def _shared(self, counts: dict[str, int], values: Tensor | None) -> Tensor | None:
        """Return the features that this rank reads, of those that its lane has received."""
        if not counts or self._lane_group is None:
            return values
        receiver = self._grid.receiver_of(self._grid.share_of(self.peers.rank))
        return shared_values(values, receiver, self._lane_group, self._device)

    def _send_back(self, gradient: Tensor, named: Sequence[Sequence[str]]) -> None:
        """Send the gradients [blocks, F, H] of the features of this rank's lane, if it is to."""
        if not self._is_receiver:
            return
        lane = self._grid.share_of(self.peers.rank)
        header = self._header(Kind.GRADIENTS, lane, named)
        self._bridge.send(header, gradient, self._grid.encoder_of(lane))
