"""Ranks of one side of a grid in which one thing fails, once, of any backend. Runs in workers only."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch_backend.torch_bugs import Injected, raise_injected

from offbeat.plugins.encoder_ranks.bridge import Header, Kind
from offbeat.plugins.encoder_ranks.encoding import EncodingTrainer
from offbeat.plugins.encoder_ranks.lane import LaneTrainer


class Faulty:
    """What fails next: the place, if this rank is one of those that fail there."""

    site = ""

    def due(self, site: str) -> bool:
        if self.site != site:
            return False
        self.site = ""
        return True

    def spoil(self, gradients: Iterable[Tensor]) -> None:
        """Put NaN or infinity at one place of the first gradient, if that is due."""
        for value in ("nan", "inf"):
            if self.due(f"{value} in a gradient"):
                next(iter(gradients)).view(-1)[-1] = float(value)


class FaultyTower(Faulty, EncodingTrainer):
    def _features(self, *given: Any, **named: Any) -> Tensor:
        if self.due("tower"):
            raise Injected("tower")
        made = super()._features(*given, **named)
        if self.due("NaN in the features"):
            made = made * float("nan")
        if made.requires_grad and self.due("tower's backward"):
            made.register_hook(raise_injected)
        if made.requires_grad and self.due("tower's second backward"):
            self.site = "tower's backward"  # of the microbatch that is computed next
        return made

    def _header(self, kind: Kind, lane: int, named: Any) -> Header:
        header = super()._header(kind, lane, named)
        if kind is Kind.FEATURES and lane == 0 and self.due("features of another step"):
            return replace(header, step=header.step - 1)
        return header


class FaultyLane(Faulty, LaneTrainer):
    def _loss(self, *given: Any) -> Any:
        if self.due("loss"):
            raise Injected("loss")
        return super()._loss(*given)

    def _header(self, kind: Kind, lane: int, named: Any) -> Header:
        header = super()._header(kind, lane, named)
        if kind is Kind.GRADIENTS and self.due("gradients of other pictures"):
            return replace(header, provenance=header.provenance ^ 1)
        return header
