import io

import msgspec
import pytest
from rich.console import Console

from offbeat.telemetry.progress import ProgressDisplay, line, panel
from offbeat.telemetry.status_file import IncidentLine, Status

STATUS = Status(
    step=12,
    steps=600,
    phase="running",
    reward=0.25,
    reward_recent=(0.0, 0.5, 1.0),
    staleness_mean=1.25,
    staleness_max=2,
    ready=3,
    in_flight=32,
    trainer_busy=0.52,
    generator_busy=0.91,
    samples_per_s=1234.0,
    verdict="generators",
    waiting_for="2 more groups",
)


class Screen:
    def __init__(self, *, terminal: bool) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=terminal, width=100, color_system=None
        )

    @property
    def text(self) -> str:
        return self.file.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def at(step: int, phase: str = "running") -> Status:
    return msgspec.structs.replace(STATUS, step=step, phase=phase)


def test_a_pipe_gets_one_plain_line() -> None:
    screen = Screen(terminal=False)
    with ProgressDisplay(screen.console) as display:
        display.update(STATUS)
    assert screen.text == (
        "step 12/600 | reward 0.250 | staleness 1.2 (max 2) | ready 3 in flight 32 | "
        "busy trainer 52% generators 91% | 1,234 samples/s | generators | "
        "running: waiting for 2 more groups\n"
    )


def test_plain_lines_keep_their_distance() -> None:
    screen, clock = Screen(terminal=False), Clock()
    with ProgressDisplay(screen.console, plain_every_s=10, clock=clock) as display:
        for step in range(1, 26):
            display.update(at(step))
            clock.now_s += 1
    shown = [row.split(" |")[0] for row in screen.text.splitlines()]
    assert shown == ["step 1/600", "step 11/600", "step 21/600"]


def test_a_new_phase_and_the_last_step_are_shown_at_once() -> None:
    screen = Screen(terminal=False)
    with ProgressDisplay(screen.console, clock=Clock()) as display:
        for status in (at(0, "starting"), at(0), at(1), at(600), at(600), at(600, "finished")):
            display.update(status)
    shown = [row.split(" |")[0] for row in screen.text.splitlines()]
    assert shown == ["step 0/600", "step 0/600", "step 600/600", "step 600/600"]


def test_the_phases_of_every_weight_sync_are_not() -> None:
    screen = Screen(terminal=False)
    with ProgressDisplay(screen.console, clock=Clock()) as display:
        for step in range(1, 9):
            display.update(at(step, "syncing" if step % 2 == 0 else "running"))
    assert len(screen.text.splitlines()) == 1


def test_a_long_weight_sync_prints_a_line_every_ten_seconds() -> None:
    screen, clock = Screen(terminal=False), Clock()
    with ProgressDisplay(screen.console, plain_every_s=10, clock=clock) as display:
        display.update(at(7))
        for _ in range(66):
            clock.now_s += 1
            display.update(at(8, "syncing"))
    assert len(screen.text.splitlines()) == 1 + 6


def test_a_controller_without_a_status_prints_a_line_every_ten_seconds_too() -> None:
    screen, clock = Screen(terminal=False), Clock()
    with ProgressDisplay(screen.console, plain_every_s=10, clock=clock) as display:
        for _ in range(25):
            display.wait("the controller, which is starting")
            clock.now_s += 1
        display.update(at(1))
        for _ in range(25):
            clock.now_s += 1
            display.wait("an answer of the controller")
    assert [row.split(" |")[0] for row in screen.text.splitlines()] == [
        *["starting: waiting for the controller, which is starting"] * 2,
        "step 1/600",
        *["running: waiting for an answer of the controller"] * 2,
    ]


def test_a_terminal_shows_what_a_silent_controller_waits_for() -> None:
    screen = Screen(terminal=True)
    with ProgressDisplay(screen.console) as display:
        display.update(STATUS)
        display.wait("an answer of the controller")
    assert "waiting for an answer of the controller" in screen.text


def test_a_terminal_gets_a_live_panel() -> None:
    screen = Screen(terminal=True)
    with ProgressDisplay(screen.console) as display:
        display.update(STATUS)
        shown = screen.text
    for part in ("12/600", "▁▅█ 0.250", "mean 1.25  max 2", "3 ready  32 in flight",
                 "trainer 52%  generators 91%", "1,234 samples/s",
                 "bottleneck: generators, waiting for 2 more groups"):  # fmt: skip
        assert part in shown


def test_a_run_that_has_nothing_to_show_yet_is_shown() -> None:
    empty = Status(step=0, steps=0, phase="starting", waiting_for="[the cluster]")
    screen = Screen(terminal=False)
    screen.console.print(panel(empty))
    assert "waiting for [the cluster]" in screen.text
    assert "reward - " in line(empty)


def test_a_status_crosses_processes() -> None:
    assert msgspec.json.decode(msgspec.json.encode(STATUS), type=Status) == STATUS


LATE = msgspec.structs.replace(
    STATUS, elapsed_s=125.0, left_s=3700.0, scores={"": 0.5}, scored_version=10
)


def test_the_time_so_far_the_time_left_and_the_last_score_are_shown() -> None:
    told = ("2 min 05 s elapsed, about 1 h 01 min left", "0.500 at version 10")
    screen = Screen(terminal=True)
    with ProgressDisplay(screen.console) as display:
        display.update(LATE)
        assert all(each in screen.text for each in told)
    assert all(each in line(LATE) for each in told)
    several = msgspec.structs.replace(LATE, scores={"math": 0.5, "code": 0.25})
    assert "evaluation math 0.500, code 0.250 at version 10" in line(several)
    assert "elapsed" not in line(STATUS)
    assert "left" not in line(msgspec.structs.replace(LATE, left_s=None))


def hit(*numbers: int) -> Status:
    incidents = tuple(IncidentLine(number, 7, f"generator-{number} was lost") for number in numbers)
    return msgspec.structs.replace(STATUS, incidents=incidents)


@pytest.mark.parametrize("terminal", [False, True])
def test_each_incident_is_one_line_when_it_happens(*, terminal: bool) -> None:
    screen = Screen(terminal=terminal)
    with ProgressDisplay(screen.console, clock=Clock()) as display:
        for status in (STATUS, hit(1), hit(1), hit(1, 2)):
            display.update(status)
    for number in (1, 2):
        assert screen.text.count(f"incident at step 7: generator-{number} was lost") == 1


def test_incidents_that_were_missed_are_counted_and_another_controller_begins_anew() -> None:
    screen = Screen(terminal=False)
    with ProgressDisplay(screen.console, clock=Clock()) as display:
        for status in (STATUS, hit(4, 5), hit(1)):
            display.update(status)
    assert screen.text.splitlines()[1:] == [
        "3 more incidents: see offbeat report",
        "incident at step 7: generator-4 was lost",
        "incident at step 7: generator-5 was lost",
        "the controller was replaced",
        "incident at step 7: generator-1 was lost",
    ]
