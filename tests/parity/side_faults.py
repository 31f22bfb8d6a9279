"""Ranks of one side of a grid in which one thing fails, once, of any backend. Runs in workers only."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch_backend.torch_bugs import Injected, raise_injected

from offbeat.plugins.encoder_ranks.bridge import Bridge, Header, Kind
from offbeat.plugins.encoder_ranks.encoding import EncoderPasses


class Faults:
    """What fails next: the place, if this rank is one of those that fail there."""

    def __init__(self) -> None:
        self.site = ""

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


class FaultyTower(EncoderPasses):
    faults = Faults()

    def _features(self, *given: Any, **named: Any) -> Tensor:
        if self.faults.due("tower"):
            raise Injected("tower")
        made = super()._features(*given, **named)
        if self.faults.due("NaN in the features"):
            made = made * float("nan")
        if made.requires_grad and self.faults.due("tower's backward"):
            made.register_hook(raise_injected)
        if made.requires_grad and self.faults.due("tower's second backward"):
            self.faults.site = "tower's backward"  # of the microbatch that is computed next
        return made


class FaultyBridge(Bridge):
    def __init__(self, faults: Faults, *given: Any) -> None:
        super().__init__(*given)
        self._faults = faults

    def send(self, header: Header, values: Tensor, rank: int) -> None:
        kind = header.kind
        if kind is Kind.FEATURES and header.lane == 0:
            if self._faults.due("features of another step"):
                header = replace(header, step=header.step - 1)
        elif kind is Kind.GRADIENTS and self._faults.due("gradients of other pictures"):
            header = replace(header, provenance=header.provenance ^ 1)
        super().send(header, values, rank)


class FaultySide:
    """Trainer of one side in which something fails; before the class of the trainer among its bases."""

    passes: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.faults = self.passes.faults = Faults()
        exchange: Any = self.passes.exchange
        device = self.passes.facts.device
        exchange.bridge = FaultyBridge(self.faults, exchange.peers.rank, device)

    def _loss(self, *given: Any) -> Any:
        if self.faults.due("loss"):
            raise Injected("loss")
        return super()._loss(*given)  # pyright: ignore[reportAttributeAccessIssue] -- of the trainer
