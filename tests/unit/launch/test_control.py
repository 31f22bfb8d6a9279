"""Commands left in a run directory: taken once, in order, or withdrawn."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath

import msgspec
import pytest
from typer.testing import CliRunner, Result

from offbeat.controller.commands import Abort, Command, Pause, Resume, Stop
from offbeat.launch.commands.main import app
from offbeat.launch.control import COMMANDS, INBOX, CommandInbox, leave, take_commands, was_taken
from offbeat.runs.directory import CONFIG, SUMMARY, RunDirUnusable


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).write_text("name: live\n")
    return tmp_path


def read(commands: list[bytes]) -> list[Command]:
    return [msgspec.json.decode(command, type=Command) for command in commands]  # type: ignore[arg-type]


def control(*args: object) -> Result:
    return CliRunner().invoke(app, ["control", *(str(arg) for arg in args)])


def test_commands_are_taken_in_the_order_they_were_left_and_once(run_dir: Path) -> None:
    for name in ("stop", "pause", "resume", "abort"):
        leave(run_dir, COMMANDS[name])
    assert read(take_commands(run_dir)) == [Stop(), Pause(), Resume(), Abort("an operator asked")]
    assert take_commands(run_dir) == []


def test_one_left_after_another_was_taken_comes_behind_those_that_wait(run_dir: Path) -> None:
    first, _ = leave(run_dir, COMMANDS["resume"]), leave(run_dir, COMMANDS["stop"])
    first.unlink()
    leave(run_dir, COMMANDS["pause"])
    assert read(take_commands(run_dir)) == [Stop(), Pause()]


def test_a_run_that_nobody_has_asked_anything_has_no_commands(tmp_path: Path) -> None:
    assert take_commands(tmp_path) == []


def test_a_command_is_seen_whole_or_not_at_all(run_dir: Path) -> None:
    (run_dir / INBOX).mkdir()
    (run_dir / INBOX / ".1234abcd").write_bytes(b'{"ty')
    leave(run_dir, COMMANDS["pause"])
    assert read(take_commands(run_dir)) == [Pause()]


def test_nothing_but_the_command_is_left_behind(run_dir: Path) -> None:
    command = leave(run_dir, COMMANDS["pause"])
    assert list((run_dir / INBOX).iterdir()) == [command]


def test_a_command_that_is_taken_while_it_is_withdrawn_counts_as_taken(run_dir: Path) -> None:
    class TakenMeanwhile(PosixPath):
        def exists(self, *, follow_symlinks: bool = True) -> bool:
            """As it was a moment before."""
            del follow_symlinks
            return True

    assert was_taken(TakenMeanwhile(run_dir / INBOX / "0-pause.json"), within_s=0)


def test_operators_at_once_lose_no_command(run_dir: Path) -> None:
    with ThreadPoolExecutor(8) as operators:
        list(operators.map(lambda _: leave(run_dir, COMMANDS["pause"]), range(40)))
    assert read(take_commands(run_dir)) == [Pause()] * 40


def test_a_file_system_that_refuses_does_not_end_the_run(run_dir: Path) -> None:
    unreadable = run_dir / INBOX / "0-pause.json"
    unreadable.mkdir(parents=True)
    assert take_commands(run_dir) == []


def test_a_command_that_was_taken_is_told_from_one_that_was_not(run_dir: Path) -> None:
    file = leave(run_dir, COMMANDS["pause"])
    assert take_commands(run_dir)
    assert was_taken(file, within_s=0)
    assert not was_taken(leave(run_dir, COMMANDS["stop"]), within_s=0)


def test_a_command_nobody_took_is_withdrawn_so_that_no_later_incarnation_obeys_it(
    run_dir: Path,
) -> None:
    was_taken(leave(run_dir, COMMANDS["stop"]), within_s=0)
    assert take_commands(run_dir) == []


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirUnusable, match="it holds no run"):
        leave(tmp_path, COMMANDS["pause"])
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_ended_is_refused_with_the_way_to_go_on(run_dir: Path) -> None:
    (run_dir / SUMMARY).write_text("{}")
    result = control(run_dir, "pause")
    assert result.exit_code == 2
    assert "its run has ended. See summary.json; offbeat train --resume" in result.stderr
    assert take_commands(run_dir) == []


def test_a_place_that_cannot_be_written_is_named_with_the_reason(run_dir: Path) -> None:
    (run_dir / INBOX).write_text("")
    result = control(run_dir, "stop")
    assert result.exit_code == 2
    assert "File exists. Ask on the machine that runs it" in result.stderr


def test_an_unknown_command_is_told_with_those_there_are(run_dir: Path) -> None:
    result = control(run_dir, "paus")
    assert result.exit_code == 2
    assert result.stderr == f"paus: no such command. Use one of {', '.join(COMMANDS)}.\n"


def test_a_run_that_does_not_notice_is_told_with_exit_code_1(run_dir: Path) -> None:
    result = control(run_dir, "pause", "--wait", 0)
    assert result.exit_code == 1
    assert (
        "the run did not accept pause within 0 s, so the command is withdrawn. Is the run alive?"
        in result.stderr
    )
    assert take_commands(run_dir) == []


def test_at_its_wall_clock_limit_a_run_is_ordered_to_stop_once_behind_its_operator(
    run_dir: Path,
) -> None:
    now = [100.0]
    orders = CommandInbox(run_dir, 60.0, clock=lambda: now[0])
    now[0] = 159.0
    assert orders.take_commands() == []
    leave(run_dir, COMMANDS["pause"])
    now[0] = 160.0
    assert read(orders.take_commands()) == [Pause(), Stop("supervision.wall_clock_limit_s=60")]
    now[0] = 500.0
    assert orders.take_commands() == []
    assert len(orders.given) == 2, "for a controller that takes over"


def test_a_run_without_a_limit_goes_on(run_dir: Path) -> None:
    now = [0.0]
    orders = CommandInbox(run_dir, None, clock=lambda: now[0])
    now[0] = 1e9
    assert orders.take_commands() == []
