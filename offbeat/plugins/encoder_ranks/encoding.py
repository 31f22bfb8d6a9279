"""Passes of encoder ranks, on any backend: media of lanes, and their gradients."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.media import Media
from offbeat.models.media_canaries import canary_media
from offbeat.models.media_passes import FeaturesMismatch
from offbeat.plugins.encoder_ranks.bridge import (
    Exchange,
    Kind,
    MergedMedia,
    dtype_code,
    gradient_dtype,
    match_media,
)
from offbeat.plugins.encoder_ranks.errors import BridgeMismatch
from offbeat.plugins.encoder_ranks.tower_proof import example, stack_features
from offbeat.trainers.backend import LogprobRequest, TopLogprobs
from offbeat.trainers.batches.packing import Batch, PackedRows, check_media
from offbeat.trainers.parts import LossOf, Passes, RankFacts
from offbeat.trainers.ranks.peers import run_and_reduce_max, run_on_all_ranks
from offbeat.trainers.torch.sharding import RankMesh, reset_after_error, settle
from offbeat.transfer_queue.schema import (
    LOSS_MASK,
    POLICY_LOGPROBS,
    TEACHER_LOGPROBS,
    Columns,
)

T = TypeVar("T")

Encode = Callable[[Media, bool], Tensor]
"""(media, whether with a graph) -> features [blocks, F, H] of the media."""


class TowerPasses:
    """Forward and backward passes over the media of one exchange.

    The forward pass keeps only the graph of the last microbatch. The backward pass begins with it,
    and computes the others again, one by one. With a single microbatch nothing is computed twice.
    """

    def __init__(self, own: Sequence[Media], count: int, padding: Media, encode: Encode) -> None:
        """Create the passes without computing anything.

        Args:
            own: Microbatches of this rank.
            count: Maximum number of microbatches on any rank, at least 1. Ranks compute the tower
                together.
            padding: Media to compute in place of missing microbatches of this rank.
            encode: The tower.
        """
        self._microbatches = [*own, *[padding] * (count - len(own))]
        self._own, self._encode = len(own), encode
        self._last: Tensor | None = None  # features of the last microbatch, with their graph
        self._lengths = list[int]()  # number of features of each microbatch

    def forward(self, *, trained: bool) -> Tensor:
        """Return the features [blocks, F, H] of this rank's media, without a graph.

        With ``trained``, ``backward`` may follow.
        """
        made = list[Tensor]()
        for at, media in enumerate(self._microbatches, start=1):
            is_last = at == len(self._microbatches)
            each = self._encode(media, trained and is_last)
            if is_last:
                self._last = each
            made.append(each.detach())
        self._lengths = [each.shape[1] for each in made]
        whole = torch.cat(made, dim=1)
        return whole[:, : sum(self._lengths[: self._own])]

    def backward(self, gradient: Tensor) -> None:
        """Add gradients to the tower's weights, given the feature gradients [blocks, F, H].

        Padding microbatches, which are computed only for other ranks, get zero gradients.
        """
        blocks, own, hidden = gradient.shape
        more = gradient.new_zeros(blocks, sum(self._lengths) - own, hidden)
        whole = torch.cat([gradient, more], dim=1)
        parts: tuple[Tensor, ...] = torch.split(whole, self._lengths, dim=1)
        made, self._last = self._last, None
        for media, part in zip(reversed(self._microbatches), reversed(parts), strict=True):
            if made is None:
                made = self._encode(media, True)  # noqa: FBT003 -- its only flag
            if made.requires_grad:
                made.backward(part)
            made = None


class TowerModel(Protocol):
    """Tower of an encoder rank, and its part of the other ranks' collectives."""

    facts: RankFacts

    def begin_update(self) -> None:
        """Prepare for the first microbatch of an optimizer step."""
        ...

    def undo(self) -> None:
        """Undo all changes of passes since ``begin_update``, except gradients."""
        ...

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        """Return the result of ``read`` after all ranks have read their own."""
        ...

    def load(self, column: str, teacher: str | None) -> PreTrainedModel:
        """Return the model for a column of logprobs. All ranks must load it together."""
        ...


class EncoderPasses(Passes[Media]):
    """Passes of one rank of the vision tower, over the media of the groups of its lanes."""

    def __init__(
        self,
        tower: TowerModel,
        exchange: Exchange,
        mesh: RankMesh,
        max_tokens: int | None,
        *,
        trained: bool,
        answer: Callable[[], TopLogprobs] = lambda: ((), ()),
    ) -> None:
        """Create the passes without computing anything.

        Args:
            tower: Computes features.
            exchange: Messages with the language ranks.
            mesh: Axes of the encoder ranks.
            max_tokens: Maximum media tokens that the tower computes at once, or None for no limit.
            trained: Whether gradients of features are sent back.
            answer: Returns the top tokens that this rank answers in place of the language ranks.
        """
        self._tower, self.exchange, self._mesh = tower, exchange, mesh
        # Only language ranks report tokens and loss
        self.facts = replace(tower.facts, leads_replica=False)
        self._peers, self._grid = exchange.peers, exchange.grid
        self._max_tokens, self._trained, self._answer = max_tokens, trained, answer

    def begin_step(self) -> None:
        self.exchange.begin_step()

    def begin_update(self) -> None:
        self._tower.begin_update()

    def undo(self) -> None:
        self._tower.undo()

    def measure(self) -> dict[str, float]:
        return self.exchange.measure()

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[Media]]:
        """Return the media of the groups that a forward pass of their lane reads."""
        found = list[Media]()
        for place, group in enumerate(groups):
            media = check_media(place, group, self.facts.media_rules)
            if media is not None and (not only_trained or np.any(group[LOSS_MASK])):
                found.append(media)
        return None, found

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[Media]]]
    ) -> tuple[T, list[Media]]:
        (what, media), _ = self._tower.agree(during, lambda: (read(), []))
        return what, media

    def load(self, column: str, teacher: str | None) -> PreTrainedModel:
        return self._tower.load(column, teacher)

    def logprobs(
        self, column: str, count: int, microbatches: Sequence[Media], request: LogprobRequest
    ) -> NDArray[np.float32]:
        """Encode the media of groups for the lanes, which compute the logprobs. Return none."""
        del request
        if column != TEACHER_LOGPROBS:
            self._encode(column, microbatches, trained=False)
        return np.empty(count, np.float32)

    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        del count
        asked = canary_media(self.facts.media_rules, prompts)
        own = [each for each in asked if each is not None]
        self._encode(POLICY_LOGPROBS, own, trained=False)
        return self._answer()

    def add_gradients(self, microbatches: Sequence[Media], loss_of: LossOf, loss: LossSpec) -> None:
        del loss_of, loss
        self._encode(POLICY_LOGPROBS, microbatches, trained=self._trained)

    @property
    def _is_sender(self) -> bool:
        """Return whether this rank exchanges the messages of its encoder."""
        return self._grid.find_sender(self._peers.rank) == self._peers.rank

    def _encode(self, name: str, media: Sequence[Media], *, trained: bool) -> None:
        """Encode media for lanes with a column's model, and add gradients if trained.

        All ranks of the world join. Encoder ranks run the tower together. A rank without media uses
        noise.
        """
        model = self.load(name, None)
        named = self.exchange.name_media([])
        if not any(named):
            return
        lanes = self._grid.list_shares(self._peers.rank)
        (batch, own), count = run_and_reduce_max(
            self._peers, "the media", lambda: self._microbatches(media, named)
        )

        def encode(media: Media, has_graph: bool) -> Tensor:  # noqa: FBT001 -- its only flag
            return self._features(model, media, has_graph=has_graph)

        passes = TowerPasses(own, count, example(self.facts.media_rules), encode)
        with reset_after_error(model):
            made = self.exchange.pass_on_all_ranks(
                "the tower", lambda: passes.forward(trained=trained)
            )
            parts = self._parts(batch, made)
            for lane, part in zip(lanes, parts, strict=True):
                if part.shape[1] and self._is_sender:
                    to = self._grid.find_receiver(lane)
                    self.exchange.bridge.send(
                        self.exchange.header(Kind.FEATURES, lane, named), part, to
                    )
            self.exchange.wait_for_all("the features")
            if trained:
                self.exchange.wait_for_all("microbatch")
                gradient = run_on_all_ranks(
                    self._peers, "the gradients", lambda: self._gradient(made, parts, named)
                )
                self._mesh.equalise([gradient])  # only one rank of the encoder received it
                self.exchange.pass_on_all_ranks(
                    "the tower's backward", lambda: passes.backward(gradient)
                )
            settle(model)

    def _microbatches(
        self, media: Sequence[Media], named: Sequence[Sequence[str]]
    ) -> tuple[tuple[MergedMedia, list[Media]], int]:
        """Return the media that this rank's lanes named, their microbatches, and a count."""
        rank = self._peers.rank
        batch = match_media(rank, [named[lane] for lane in self._grid.list_shares(rank)], media)
        if not batch.media:
            return (batch, []), 0
        whole = self.facts.media_rules.merge(batch.media)
        cut = (
            [whole]
            if self._max_tokens is None
            else self.facts.media_rules.cut(whole, self._max_tokens)
        )
        return (batch, cut), len(cut)

    def _features(self, model: PreTrainedModel, media: Media, *, has_graph: bool) -> Tensor:
        """Compute the features [blocks, F, H] of media in one pass of the tower."""
        with torch.set_grad_enabled(has_graph):
            made = stack_features(self.facts.media_rules.encode(model, (media,)))
        wanted = self.facts.media_rules.count_features(media)
        if made.shape[1] != wanted:
            raise FeaturesMismatch(type(model).__name__, made.shape[1], wanted)
        return made

    def _parts(self, batch: MergedMedia, made: Tensor) -> list[Tensor]:
        """Return the features of each lane, empty for a lane without media."""
        counts, media = list[int](), iter(batch.media)
        for prompts in batch.counts:
            counts.append(
                sum(self.facts.media_rules.count_features(next(media)) for _ in range(prompts))
            )
        parts: tuple[Tensor, ...] = torch.split(made, counts, dim=1)
        return list(parts)

    def _gradient(
        self, made: Tensor, parts: Sequence[Tensor], named: Sequence[Sequence[str]]
    ) -> Tensor:
        """Receive the gradient [blocks, F, H] of the features from the lanes.

        A rank that exchanges no messages returns zeros. All messages are received before an error
        of one is raised. Otherwise a lane with an unreceived message would wait for its timeout.
        """
        gradient, wrong = torch.zeros_like(made), list[BridgeMismatch]()
        at = 0
        for lane, part in zip(self._grid.list_shares(self._peers.rank), parts, strict=True):
            blocks, count, hidden = part.shape
            if count and self._is_sender:
                due = replace(
                    self.exchange.header(Kind.GRADIENTS, lane, named),
                    blocks=blocks,
                    features=count,
                    hidden=hidden,
                    dtype=dtype_code(gradient_dtype(made.dtype)),
                )
                sender = self._grid.find_receiver(lane)
                try:
                    gradient[:, at : at + count] = self.exchange.bridge.receive(due, sender)
                except BridgeMismatch as mismatch:
                    wrong.append(mismatch)
                at += count
        if wrong:
            raise wrong[0]
        return gradient
