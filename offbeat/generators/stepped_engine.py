"""Interface of an engine that computes in steps, such as one that a plug-in brings.

``EngineLoop`` drives it from one thread, which is the only one that touches it.
"""

from collections.abc import Sequence
from typing import Protocol

from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.weights import CanaryAnswer


class SteppedEngine(Protocol):
    """An engine that draws tokens in ``step``; between two steps its weights may be exchanged."""

    tokens: int
    """Tokens generated since start."""

    busy_s: float
    """Seconds spent in ``step`` since start."""

    @property
    def name(self) -> str: ...

    @property
    def running(self) -> int:
        """Return the number of samples that have begun."""
        ...

    @property
    def waiting(self) -> int:
        """Return the number of requests that have not begun."""
        ...

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: It can never be served, or its id is open.
            EngineUnavailable: The weights are of no version.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Remove a request; an id that is not open is ignored."""
        ...

    def step(self) -> list[GenerateResult]:
        """Go on with the open requests, and return those that have finished.

        Whatever it raises ends the engine.
        """
        ...

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[CanaryAnswer]:
        """Return the most probable next token after each prompt, at temperature 1."""
        ...

    def set_version(self, version: int) -> None:
        """Stamp tokens with this version from the next step on; ends ``lose``."""
        ...

    def lose(self, problem: str) -> None:
        """Drop open requests and refuse new ones: the weights are of no version."""
        ...
