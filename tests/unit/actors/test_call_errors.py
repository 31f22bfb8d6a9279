import asyncio
from collections.abc import Generator
from typing import Any, cast

import pytest
from ray.exceptions import (
    ObjectFetchTimedOutError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
)

from offbeat.actors.call import await_reply, find_raised_line
from offbeat.messages.failures import ActorLost, ArgumentLost, OffbeatError
from offbeat.messages.text import first_line

TRACEBACK = """The actor died because of an error raised in its creation task, ray::Actor.__init__()
  File "split_step.py", line 3, in __init__
    raise ValueError(path)
ValueError: models/none holds no weights
"""

CHAINED = """The actor died because of an error raised in its creation task, ray::Actor.__init__()
    import vllm
ModuleNotFoundError: No module named 'vllm'

The above exception was the direct cause of the following exception:

ray::Actor.__init__() (pid=1, ip=10.0.0.1)
  File "lazy_import.py", line 3, in load_library
    raise VllmMissing(str(error)) from error
a.b.VllmMissing: vLLM cannot be imported. Install it
"""
OF_MANY_LINES = """  File "main.py", line 1, in __init__
    Model.model_validate({})
pydantic_core.ValidationError: 2 validation errors for Model
steps
  Field required
model
  Field required
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (CHAINED, "a.b.VllmMissing: vLLM cannot be imported. Install it"),
        (OF_MANY_LINES, "pydantic_core.ValidationError: 2 validation errors for Model"),
        ("    assert False\nAssertionError", "AssertionError"),
        (TRACEBACK, "ValueError: models/none holds no weights"),
        ("nothing that looks like an exception\nsecond", "nothing that looks like an exception"),
        (
            "a.b.c.UnsupportedModel: it cannot be packed",
            "a.b.c.UnsupportedModel: it cannot be packed",
        ),
        ("", "Exception"),
    ],
)
def test_what_was_raised_is_told_in_one_line(text: str, line: str) -> None:
    assert find_raised_line(Exception(text)) == line


def test_an_error_without_text_is_told_by_its_name() -> None:
    assert first_line(KeyError()) == "KeyError"


class Answered:
    """An awaitable reference whose value is this error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __await__(self) -> Generator[None]:
        yield from ()
        raise self.error


def failure_of(error: Exception) -> OffbeatError:
    """What a caller is told when the reply to its call is this error of Ray's."""

    async def call() -> None:
        await await_reply(cast("Any", Answered(error)), "trainer rank 0", "microbatch")

    with pytest.raises(OffbeatError) as failure:
        asyncio.run(call())
    return failure.value


def raised_there(cause: Exception) -> Exception:
    """As the caller gets what was raised in the callee."""
    return RayTaskError("f", "ray::f()", cause, "f", 1, "10.0.0.1").as_instanceof_cause()


@pytest.mark.parametrize("kind", [ObjectLostError, OwnerDiedError, ObjectFetchTimedOutError])
def test_a_lost_argument_is_told_from_a_lost_callee(kind: type[ObjectLostError]) -> None:
    """The callee that could not be given an argument says so itself: it is there."""
    lost = failure_of(raised_there(kind("ab" * 14, b"", "")))
    assert isinstance(lost, ArgumentLost)
    assert lost.object_id == "ab" * 14
    reply_lost = failure_of(kind("ab" * 14, b"", ""))
    assert type(reply_lost) is ActorLost


def test_a_process_that_the_memory_monitor_ended_is_a_lost_one_and_says_so() -> None:
    lost = failure_of(OutOfMemoryError("Task was killed due to the node running low on memory"))
    assert type(lost) is ActorLost
    assert "memory monitor" in str(lost)
    assert "Fix:" in str(lost)
