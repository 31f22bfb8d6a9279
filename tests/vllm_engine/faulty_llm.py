"""Between an actor and its engine: calls that raise, hang, lose their answer or strike, as asked."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Fault = Literal["raises", "is lost", "answer is lost", "hangs"]


@dataclass
class FaultyLlm:
    """Forwards everything; ``faults`` maps a call and its turn (from 0) to what becomes of it."""

    llm: Any
    faults: dict[tuple[str, int], Fault] = field(default_factory=dict)
    before: dict[tuple[str, int], Callable[[], Awaitable[None]]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.llm, name)
        watched = {call for call, _ in (*self.faults, *self.before)}
        if name not in watched:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            turn = self.calls[name] = self.calls.get(name, -1) + 1
            if strike := self.before.pop((name, turn), None):
                await strike()
            match self.faults.pop((name, turn), None):
                case "raises":
                    raise RuntimeError(f"{name} {turn} was told to raise")
                case "is lost":
                    raise ConnectionError(f"{name} {turn} never left")
                case "answer is lost":
                    await found(*args, **kwargs)
                    raise ConnectionError(f"the answer to {name} {turn} never came")
                case "hangs":
                    await asyncio.Event().wait()
                case _:
                    return await found(*args, **kwargs)
            raise AssertionError("a hanging call ends only by being cancelled")

        return call
