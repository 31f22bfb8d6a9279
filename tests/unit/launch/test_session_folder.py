"""Where a private Ray keeps its sockets and logs, which it lets everybody write."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.launch.cluster import session_folder


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: that of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="o") as folder:
        yield Path(folder)


def own(place: Path) -> Path:
    return place / f"offbeat-{os.getuid()}"


def folder_in(place: Path) -> Path:
    found = session_folder({"TMPDIR": str(place)})
    assert found is not None
    return Path(found)


def is_closed(folder: Path) -> bool:
    return stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_sessions_lie_behind_a_folder_that_only_their_owner_enters(place: Path) -> None:
    assert folder_in(place) == own(place) / "ray"
    assert is_closed(own(place))
    assert folder_in(place) == own(place) / "ray", "and the next run's beside them"


def test_a_folder_that_is_open_is_closed(place: Path) -> None:
    own(place).mkdir()
    own(place).chmod(0o777)
    assert folder_in(place) == own(place) / "ray"
    assert is_closed(own(place))


def test_a_link_that_somebody_has_left_there_is_not_followed(place: Path) -> None:
    (place / "elsewhere").mkdir()
    own(place).symlink_to(place / "elsewhere")
    found = folder_in(place)
    assert found.parent.parent == place and found.parent != own(place)
    assert is_closed(found.parent)
    assert not [*(place / "elsewhere").iterdir()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_not_taken(place: Path) -> None:
    own(place).mkdir(mode=0o700)
    os.chown(own(place), 12345, 12345)
    found = folder_in(place)
    assert found.parent.parent == place and found.parent != own(place)
    assert is_closed(found.parent)


@pytest.mark.parametrize(
    "environment",
    [{"RAY_TMPDIR": "/x"}, {"TMPDIR": "/nowhere/at/all"}],
    ids=["chosen by the user", "cannot be made"],
)
def test_where_there_is_no_such_folder_ray_decides(environment: dict[str, str]) -> None:
    assert session_folder(environment) is None


def test_a_path_that_is_too_long_for_a_socket_is_left_to_ray(place: Path) -> None:
    long = place / ("x" * 80)
    long.mkdir()
    assert session_folder({"TMPDIR": str(long)}) is None
