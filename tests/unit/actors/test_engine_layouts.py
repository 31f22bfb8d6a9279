"""The layout that trainer ranks plan for, asked of engines that answer, have none, fail or are silent."""

import asyncio
from collections.abc import Sequence

import pytest

from offbeat.actors.ray_trainer import EngineLayouts
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.region import Region

FENCE = Fence("run", 1)
LAYOUT = EngineLayout(("w",), ((("w", Region((0,), (4,))),),))
LOST, SILENT = ActorLost("generator-0", "record its layout", "died"), "silent"
Answer = EngineLayout | ActorLost | str | None


class Engines:
    """Each engine's answers, one per call; the last one stays."""

    def __init__(self, *answers: Sequence[Answer]) -> None:
        self._answers = [list(each) for each in answers]
        self.calls = 0

    async def ask(self, engine: int, fence: Fence) -> EngineLayout | None:
        assert fence == FENCE
        self.calls += 1
        answers = self._answers[engine]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, ActorLost):
            raise answer
        if isinstance(answer, str):
            await asyncio.Event().wait()
        assert not isinstance(answer, str)
        return answer

    def layouts(self, first_s: float = 100.0) -> EngineLayouts:
        """Asked from the last engine on."""
        places = reversed(range(len(self._answers)))
        asks = {str(at): lambda fence, at=at: self.ask(at, fence) for at in places}
        return EngineLayouts(asks, first_s)

    def found(self, first_s: float = 100.0) -> list[EngineLayout | None]:
        """What two releases are cut for."""

        async def main() -> list[EngineLayout | None]:
            layouts = self.layouts(first_s)
            return [await layouts.first(FENCE) for _ in range(2)]

        return asyncio.run(main())


@pytest.mark.parametrize("others", [[], [[None]], [[LOST]], [[SILENT], [None], [LOST]]])
def test_the_first_engine_that_has_a_layout_is_enough_whatever_the_others_do(
    others: list[list[Answer]],
) -> None:
    engines = Engines([LAYOUT], *others)
    assert engines.found() == [LAYOUT, LAYOUT]
    assert engines.calls == 1 + len(others), "they are asked once"


def test_engines_that_all_have_none_are_not_asked_again() -> None:
    engines = Engines([None], [None])
    assert engines.found() == [None, None]
    assert engines.calls == 2


def test_an_engine_that_is_lost_is_asked_again_for_the_next_release() -> None:
    assert Engines([LOST, LAYOUT]).found() == [None, LAYOUT]


def test_a_silent_engine_holds_up_a_release_no_longer_than_the_limit() -> None:
    assert Engines([SILENT, LAYOUT]).found(0.0) == [None, LAYOUT]
