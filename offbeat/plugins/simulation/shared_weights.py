"""Fake of the weights that engines share (``generator.share_weights``), and of their gate."""

from typing import Protocol


class Decoder(Protocol):
    """Engine that decodes with shared weights."""

    def stop_decoding(self) -> None: ...
    def continue_decoding(self) -> None: ...


class SharedWeights:
    """Weights of one trainer process. Engines that use them stop while they change."""

    def __init__(self, incarnation: int) -> None:
        """``incarnation``: number of the trainer process."""
        self.incarnation = incarnation
        self.published: tuple[int, str] | None = None  # version and digest of these weights
        self.is_changing = False
        self._users = dict[Decoder, None]()  # engines that have loaded the present weights

    def close(self) -> None:
        """Begin a change."""
        self.is_changing = True
        for engine in self._users:
            engine.stop_decoding()

    def open(self, *, changed: bool) -> None:
        """End a change. Engines continue, or must load the new weights first."""
        self.is_changing = False
        if changed:
            self._users.clear()
            self.published = None
        for engine in self._users:
            engine.continue_decoding()

    def adopt(self, engine: Decoder) -> None:
        """Let an engine decode with the present weights."""
        self._users[engine] = None
        engine.continue_decoding()

    def leave(self, engine: Decoder) -> None:
        """Forget an engine that has died or serves nothing."""
        self._users.pop(engine, None)
