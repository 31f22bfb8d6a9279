"""Passes of language ranks, on any backend: receive features, send their gradients back."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.media import Media
from offbeat.models.media_canaries import canary_media
from offbeat.models.media_passes import Features
from offbeat.plugins.encoder_ranks.bridge import (
    Exchange,
    Kind,
    digest_media,
    gradient_dtype,
    media_read,
    share_values,
)
from offbeat.trainers.backend import LogprobRequest, TopLogprobs
from offbeat.trainers.batches.packing import Batch, PackedRows
from offbeat.trainers.errors import AbsentModule
from offbeat.trainers.parts import LossOf, Passes
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.sides import Side
from offbeat.transfer_queue.schema import Columns

T = TypeVar("T")


class LaneFeatures:
    """Features of one exchange, found by the content of their media.

    ``leaf`` [blocks, F, H] adds up the gradients of all microbatches that read the features, in at
    least float32. It is None without media.
    """

    def __init__(self, counts: dict[str, int], values: Tensor | None, *, trained: bool) -> None:
        """``counts``: number of features of each media digest, in the order of ``values``."""
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
        assert self.leaf is not None  # noqa: S101 -- a lane with media has received features
        parts = [self.leaf[:, self._spans[digest_media(each)]] for each in media]
        embedded_FH, *deep = torch.cat(parts, dim=1).unbind()
        return Features(embedded_FH, tuple(deep))

    @property
    def gradient(self) -> Tensor | None:
        """Return the summed gradients, or zeros if no pass read a feature."""
        if self.leaf is None or self.leaf.grad is not None:
            return None if self.leaf is None else self.leaf.grad
        return torch.zeros_like(self.leaf)


class LanePasses(Passes[PackedRows]):
    """Passes of one language rank. They wrap the passes of a backend and compute no tower."""

    def __init__(
        self,
        passes: Passes[PackedRows],
        exchange: Exchange,
        group: dist.ProcessGroup | None,
        *,
        trained: bool,
    ) -> None:
        """Wrap passes without exchanging anything.

        Args:
            passes: Passes of the backend. They call ``read_features``.
            exchange: Messages with the encoder ranks.
            group: Ranks of the lane that read the same features. None if this rank reads none, or
                no other rank does.
            trained: Whether gradients of features are sent back.
        """
        self._passes, self.facts = passes, passes.facts
        self.exchange, self._group, self._trained = exchange, group, trained
        self._peers, self._grid = exchange.peers, exchange.grid
        self._received: LaneFeatures | None = None  # of the open exchange; None outside

    def read_features(self, media: tuple[Media, ...]) -> Features:
        """Return the features of media that a pass reads.

        Raises:
            AbsentModule: No features were received, and this rank has no tower.
        """
        if self._received is None:
            raise AbsentModule("the vision tower", Side.LANGUAGE)
        return self._received.of(media)

    # --- same as the wrapped passes --------------------------------------------------------------

    def begin_step(self) -> None:
        self.exchange.begin_step()
        self._passes.begin_step()

    def begin_update(self) -> None:
        self._passes.begin_update()

    def undo(self) -> None:
        self._passes.undo()

    def measure(self) -> dict[str, float]:
        return self._passes.measure() | self.exchange.measure()

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        return self._passes.cut(groups, only_trained=only_trained)

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        return self._passes.agree(during, read)

    def load(self, column: str, teacher: str | None) -> object:
        return self._passes.load(column, teacher)

    def count_work(self, microbatches: Sequence[PackedRows]) -> tuple[int, float] | None:
        return self._passes.count_work(microbatches)

    def router_biases(self) -> list[tuple[int, Tensor]]:
        return self._passes.router_biases()

    # --- passes inside an exchange ---------------------------------------------------------------

    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        asked = canary_media(self.facts.media_rules, prompts)
        with self._exchange([each for each in asked if each is not None], trained=False):
            return self._passes.top_logprobs(prompts, count)

    def logprobs(
        self, column: str, count: int, microbatches: Sequence[PackedRows], request: LogprobRequest
    ) -> NDArray[np.float32]:
        self.load(column, request.get("teacher"))  # before the exchange, on all ranks
        with self._exchange(media_read(microbatches), trained=False):
            return self._passes.logprobs(column, count, microbatches, request)

    def add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, loss: LossSpec
    ) -> None:
        with self._exchange(media_read(microbatches), trained=self._trained) as agree:
            add = partial(self._passes.add_gradients, microbatches, loss_of, loss)
            if not agree:
                add()
                return
            # Report a failure here, or encoder ranks would wait for gradients until their timeout.
            self.exchange.pass_on_all_ranks("microbatch", add)

    @contextmanager
    def _exchange(self, media: Sequence[Media], *, trained: bool) -> Generator[bool]:
        """Receive features for the passes inside the block, then send their gradients.

        All ranks of the world must enter together. The yielded value is whether any lane sends
        gradients. If so, the passes must end on all ranks before gradients are sent.
        """
        self._received = None
        rules = self.facts.media_rules
        counts = {digest_media(each): rules.count_features(each) for each in media}
        named = self.exchange.name_media(list(counts))
        if not any(named):
            yield False
            return
        for during in ("the media", "the tower"):
            self.exchange.wait_for_all(during)
        values = run_on_all_ranks(
            self._peers, "the features", lambda: self._receive_values(counts, named)
        )
        received = LaneFeatures(counts, self._share(counts, values), trained=trained)
        self._received = received
        try:
            yield trained
        finally:
            self._received = None
        if not trained:
            return
        if (gradient := received.gradient) is not None:
            self._send_back(gradient, named)
        for during in ("the gradients", "the tower's backward"):
            self.exchange.wait_for_all(during)

    @property
    def _is_receiver(self) -> bool:
        """Return whether this rank exchanges messages for its lane."""
        rank = self._peers.rank
        return rank == self._grid.find_receiver(self._grid.find_share(rank))

    def _receive_values(
        self, counts: dict[str, int], named: Sequence[Sequence[str]]
    ) -> Tensor | None:
        """Receive the features [blocks, F, H] of this rank's lane.

        Return None without media, or on a rank that exchanges no messages.
        """
        if not counts or not self._is_receiver:
            return None
        lane = self._grid.find_share(self._peers.rank)
        header = self.exchange.header(Kind.FEATURES, lane, named)
        due = replace(header, features=sum(counts.values()))
        return self.exchange.bridge.receive(due, self._grid.find_encoder(lane))

    def _share(self, counts: dict[str, int], values: Tensor | None) -> Tensor | None:
        """Share the received features of the lane and return the features that this rank reads."""
        if not counts or self._group is None:
            return values
        receiver = self._grid.find_receiver(self._grid.find_share(self._peers.rank))
        return share_values(values, receiver, self._group, self.facts.device)

    def _send_back(self, gradient: Tensor, named: Sequence[Sequence[str]]) -> None:
        """Send gradients [blocks, F, H] of the lane's features, if this rank is the receiver."""
        if not self._is_receiver:
            return
        lane = self._grid.find_share(self._peers.rank)
        header = self.exchange.header(Kind.GRADIENTS, lane, named)
        self.exchange.bridge.send(header, gradient, self._grid.find_encoder(lane))
