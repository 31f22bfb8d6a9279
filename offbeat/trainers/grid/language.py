"""Trainer of a language rank: features of pictures come from an encoder rank, their gradients go back."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.multimodal.canary_pictures import canary_media
from offbeat.multimodal.tower import Features
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.grid.bridge import Kind, gradient_dtype
from offbeat.trainers.grid.provenance import digest_of, pictures_read
from offbeat.trainers.grid.sides import no_features
from offbeat.trainers.grid.trainer import GridTrainer
from offbeat.trainers.model_trainer import LossOf
from offbeat.trainers.ranks.peers import run_on_all_ranks


class LaneFeatures:
    """Features of the pictures of one exchange, by the content of the pictures.

    ``leaf`` [blocks, F, H] adds up the gradients of all microbatches that read them, in float32 at
    least; None without pictures.
    """

    def __init__(self, counts: dict[str, int], values: Tensor | None, *, trained: bool) -> None:
        """``counts``: number of features of the pictures of each digest, in the order of ``values``."""
        ends = np.cumsum(list(counts.values())).tolist()
        self._spans = {
            digest: slice(end - count, end)
            for (digest, count), end in zip(counts.items(), ends, strict=True)
        }
        self.leaf = values
        if values is not None and trained:
            self.leaf = values.to(gradient_dtype(values.dtype)).requires_grad_()

    def of(self, model: PreTrainedModel, media: tuple[Media, ...]) -> Features:
        """Return the features of pictures, in their order."""
        del model
        assert self.leaf is not None  # noqa: S101 -- a lane with pictures has received some
        parts = [self.leaf[:, self._spans[digest_of(each)]] for each in media]
        embedded_FH, *deep = torch.cat(parts, dim=1).unbind()
        return Features(embedded_FH, tuple(deep))


class LanguageTrainer(GridTrainer):
    """Trainer of one rank of the language model, which is one lane."""

    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        asked = canary_media(self._rules, prompts)
        with self._exchanged([each for each in asked if each is not None], trained=False):
            return super().top_logprobs(prompts, count)

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        self._model_of(name)  # loaded before the exchange, on all ranks
        with self._exchanged(pictures_read(microbatches), trained=False):
            return super()._logprobs(name, count, microbatches, temperature)

    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        with self._exchanged(pictures_read(microbatches), trained=self._trains_tower) as agree:
            add = super()._add_gradients
            if not agree:
                add(microbatches, loss_of, temperature)
                return
            # A failure is named here: encoder ranks would wait for gradients until their timeout.
            self._pass_on_all_ranks("microbatch", lambda: add(microbatches, loss_of, temperature))

    @contextmanager
    def _exchanged(self, media: Sequence[Media], *, trained: bool) -> Generator[bool]:
        """Receive the features that the passes inside the block read; then send their gradients.

        All ranks of the world enter together. The value is whether gradients are sent by any lane, and
        the passes have to end on all ranks before they are.
        """
        self._features_of = no_features  # until some are received: this rank has no tower
        counts = {digest_of(each): self._rules.features(each) for each in media}
        named = self._named_by_ranks(list(counts))
        lane, encoder = self.peers.rank, self._grid.encoder_of(self.peers.rank)
        if not any(named):
            yield False
            return
        for during in ("the pictures", "the tower"):
            self._wait_for_all(during)
        due = replace(self._header(Kind.FEATURES, lane, named), features=sum(counts.values()))
        values = run_on_all_ranks(
            self.peers,
            "the features",
            lambda: self._bridge.receive(due, encoder) if counts else None,
        )
        received = LaneFeatures(counts, values, trained=trained)
        self._features_of = received.of
        try:
            yield trained
        finally:
            self._features_of = no_features
        if not trained:
            return
        if received.leaf is not None:
            gradient = received.leaf.grad
            if gradient is None:
                gradient = torch.zeros_like(received.leaf)
            self._bridge.send(self._header(Kind.GRADIENTS, lane, named), gradient, encoder)
        for during in ("the gradients", "the tower's backward"):
            self._wait_for_all(during)
