"""Lines that several processes append to one file: each is there whole, none is lost."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.run_files.files import RunFiles
from offbeat.run_files.line_file import LineFile


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_what_another_process_appends_meanwhile_stays(turns: list[bool]) -> None:
    """As of a controller that was frozen and goes on beside the one that took its place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logs" / "lines"
        files = [LineFile(path), LineFile(path)]
        want = [f"line {number} {'of the other ' * turn}\n" for number, turn in enumerate(turns)]
        for turn, line in zip(turns, want, strict=True):
            files[turn].append(line.encode())
        for file in files:
            file.close()
        assert path.read_text() == "".join(want)


@given(st.integers(0, 200_000), st.booleans())
def test_a_torn_line_is_cut_off_by_the_next_process_that_appends(torn: int, first: bool) -> None:
    before = b"" if first else b"whole\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logs" / "lines"
        path.parent.mkdir()
        path.write_bytes(before + b"x" * torn)
        RunFiles(Path(folder)).append("logs/lines", b"next\n")
        assert path.read_bytes() == before + b"next\n"


def test_a_disk_that_refuses_raises_and_the_file_can_be_closed_twice() -> None:
    file = LineFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.append(b"line\n")
    file.close()
    file.close()
