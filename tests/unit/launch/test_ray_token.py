"""The token with which anybody on this machine could run code in a private Ray."""

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from offbeat.launch.ray_token import keep_token_private, token_file


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_that_only_its_owner_reads(tmp_path: Path) -> None:
    keep_token_private({}, tmp_path)
    made = token_file(tmp_path)
    assert (mode_of(made), mode_of(made.parent)) == (0o600, 0o700)
    assert len(bytes.fromhex(made.read_text())) == 32
    assert [*made.parent.iterdir()] == [made]


def test_a_token_that_everybody_may_read_is_closed_and_stays_the_same(tmp_path: Path) -> None:
    token_file(tmp_path).parent.mkdir()
    token_file(tmp_path).write_text("as Ray made it")
    token_file(tmp_path).chmod(0o644)
    keep_token_private({"RAY_AUTH_MODE": "token"}, tmp_path)
    assert mode_of(token_file(tmp_path)) == 0o600
    assert token_file(tmp_path).read_text() == "as Ray made it"


@pytest.mark.parametrize(
    "environment",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/x"}],
)
def test_no_token_is_made_that_nobody_would_use(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    keep_token_private(environment, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_home_that_cannot_be_written_is_left_to_ray(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file")
    keep_token_private({}, tmp_path)
    assert (tmp_path / ".ray").read_text() == "a file"
