"""Questions about the served weights: engines answer, fail or are late, and nobody waits."""

from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from offbeat.launch.read_backs import ReadBacks
from offbeat.messages.failures import EngineUnavailable
from offbeat.weight_sync.served import ServedWeights


class Engines:
    """Engines that are asked once, and a clock."""

    def __init__(self, run_dir: Path) -> None:
        self.replies = {name: Future[ServedWeights]() for name in ("a", "b")}
        self.now_s, self._folder = 0.0, run_dir / "verify"
        self._folder.mkdir()
        (self._folder / "1.question").touch()
        self._read_backs = ReadBacks(run_dir, lambda: self.replies, lambda: self.now_s)

    def poll(self) -> list[tuple[str, int | None, str]] | None:
        """Return engine, version and problem of each answer; None if there is no answer yet."""
        self._read_backs.poll()
        path = self._folder / "1.answer"
        if not path.exists():
            return None
        served = msgspec.msgpack.decode(path.read_bytes(), type=list[ServedWeights])
        return [(each.engine, each.version, each.problem) for each in served]


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def test_a_question_is_answered_once_all_engines_have(engines: Engines) -> None:
    assert engines.poll() is None
    engines.replies["a"].set_result(ServedWeights("a", 3))
    assert engines.poll() is None
    engines.replies["b"].set_exception(EngineUnavailable("b", "read back", "it broke", "Wait"))
    answers = engines.poll()
    assert answers is not None
    assert answers[0] == ("a", 3, "")
    assert answers[1][:2] == ("b", None) and "it broke" in answers[1][2]


def test_an_engine_that_is_late_or_gone_is_named(engines: Engines) -> None:
    assert engines.poll() is None
    engines.replies["a"].cancel()
    engines.now_s = 49.0
    assert engines.poll() is None
    engines.now_s = 50.0
    assert engines.poll() == [("a", None, "its loop has ended"), ("b", None, "no answer in 50 s")]
    assert engines.replies["b"].cancelled()
