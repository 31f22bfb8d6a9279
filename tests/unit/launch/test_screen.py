import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from offbeat.launch.screen import screen


@pytest.fixture(params=["reader gone", "disk full"])
def failing(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """A stream that fails at its first byte, and would again when it is closed."""
    if request.param == "disk full":
        with Path("/dev/full").open("w") as stream:
            yield stream
        return
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


def test_a_stream_that_fails_ends_nothing_that_writes_to_it(failing: TextIO) -> None:
    console = screen(failing)
    for _ in range(3):
        console.print("step 1/1000")


def test_what_is_told_arrives(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        screen(stream).print("step 1/1000")
        assert (tmp_path / "out").read_text() == "step 1/1000\n"


@pytest.mark.parametrize(("encoding", "written"), [("ascii", "50 ? ??"), ("latin-1", "50 µ ??")])
def test_characters_that_a_stream_cannot_encode_are_replaced(
    tmp_path: Path, encoding: str, written: str
) -> None:
    with (tmp_path / "out").open("w", encoding=encoding) as stream:
        screen(stream).print("50 µ █▋")
    assert (tmp_path / "out").read_text(encoding=encoding) == f"{written}\n"


def test_without_a_stream_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    screen(None).print("step 1/1000")
    assert capsys.readouterr() == ("", "")
