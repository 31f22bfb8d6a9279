"""Lines that several processes append to one file: each is there whole, none is lost."""

import fcntl
import subprocess
import sys
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


_WRITER = """
import os, sys
from pathlib import Path
from offbeat.run_files.line_file import LineFile
file, name = LineFile(Path(sys.argv[1])), sys.argv[2]
os.write(1, b"ready")
os.read(0, 1)
for number in range(300):
    file.append((f"{name} {number} " + name * 30_000 + "\\n").encode())
"""


def test_processes_that_append_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path / "lines"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.read(5) == b"ready"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"x")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
    lines = (tmp_path / "lines").read_text().splitlines()
    assert sorted(lines) == sorted(
        f"{name} {n} " + name * 30_000 for name in "ab" for n in range(300)
    )


def test_beside_a_process_that_is_stopped_in_an_append_a_torn_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    path.write_bytes(b"whole\ntor")
    with path.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        file.append(b"next\n")
        file.append(b"one more\n")
    file.append(b"last\n")
    file.close()
    assert path.read_bytes() == b"whole\ntor\nnext\none more\nlast\n"


def test_a_disk_that_refuses_raises_and_the_file_can_be_closed_twice() -> None:
    file = LineFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.append(b"line\n")
    file.close()
    file.close()
