"""trace.json: what a viewer is handed, whatever the run told."""

import itertools
import json
import math
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.telemetry.trace import TraceFile, TraceJson
from tests.support.world import World

Event = dict[str, Any]


class Clock:
    def __init__(self, now_s: float = 50.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Pauses:
    """The writer's pauses: each lasts until the test, or the end of the run, ends it."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, finishing: threading.Event, pause_s: float) -> None:
        self.begun.release()
        while not finishing.is_set() and not self.go_on.acquire(timeout=0.01):
            pass

    def next(self) -> None:
        """Return once the writer has written what there was before this call."""
        assert self.begun.acquire(timeout=30)


def trace_at(path: Path, **options: Any) -> TraceFile:
    options = {"unix_s": lambda: 1000.0, **options}
    return TraceFile(path, Clock(), **options)


def read(path: Path) -> list[Event]:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def timed(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] != "M"]


def names(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    found = (event for event in events if event["name"] == what)
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in found}


def check(events: list[Event]) -> None:
    """A viewer takes every event: rows are stacks, asynchronous pairs nest, lanes have names."""
    processes = {pid for pid, _ in names(events, "process_name")}
    threads = names(events, "thread_name")
    rows, pairs = defaultdict[Any, list[Event]](list), defaultdict[Any, list[Event]](list)
    for event in timed(events):
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
        assert event["pid"] in processes
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in threads
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
        if event["ph"] in "be":
            pairs[event["pid"], event["cat"], event["id"]].append(event)
    for spans in rows.values():
        check_row(spans)
    for halves in pairs.values():
        check_pairs(halves)


def check_row(spans: list[Event]) -> None:
    ends = list[int]()
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end = span["ts"] + span["dur"]
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], "a span crosses another"
        ends.append(end)


def check_pairs(halves: list[Event]) -> None:
    begun = list[str]()
    for half in sorted(halves, key=lambda half: half["ts"]):
        if half["ph"] == "b":
            begun.append(half["name"])
        else:
            assert begun.pop() == half["name"], "an end of another span"
    assert not begun


LANES = [
    ("pump", "train"),
    ("engine", "generator-0"),
    ("rank", "0"),
    ("group", "g-000000"),
    ("group", "g-000412"),
    ("disk", "nobody foresaw it"),
]
moments = st.integers(-2, 30).map(lambda tenths: 50 + tenths / 10)
told = st.lists(st.tuples(st.sampled_from(LANES), moments, moments, st.booleans()), max_size=60)


@given(told)
def test_whatever_is_told_the_events_are_legal(story: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_at(Path(folder) / "trace.json")
        for number, (lane, start, end, is_mark) in enumerate(story):
            if is_mark:
                trace.mark(lane, f"event {number}", start)
            else:
                trace.span(lane, f"event {number}", start, end, number=number)
        tally = trace.close(30)
        events = read(Path(folder) / "trace.json")
    check(events)
    assert {event["name"] for event in timed(events)} == {f"event {n}" for n in range(len(story))}
    assert (tally.written, tally.left_out, tally.pending) == (len(story), 0, 0)


def test_a_kind_is_a_process_a_lane_a_thread_and_a_group_an_id(tmp_path: Path) -> None:
    trace = trace_at(tmp_path / "trace.json")
    trace.span(("pump", "train"), "waits", 50.5, 51.0, on="groups")
    trace.span(("engine", "generator-0"), "g-000007", 50.0, 51.0)
    trace.span(("rank", "0"), "finish", 50.0, 52.0)
    trace.span(("group", "g-000412"), "rollout", 50.0, 51.0, attempt=2)
    trace.mark(("engine", "generator-0"), "lost", 51.5)
    trace.close(30)
    events = read(tmp_path / "trace.json")
    assert list(names(events, "process_name").values()) == [
        "pumps", "engines", "trainer ranks", "groups",
    ]  # fmt: skip
    assert list(names(events, "thread_name").values()) == ["train", "generator-0", "0"]
    waits, _, _, begin, end, lost = timed(events)
    assert (waits["ts"], waits["dur"], waits["args"]) == (500_000, 500_000, {"on": "groups"})
    assert (begin["ph"], end["ph"], begin["id"], end["id"]) == ("b", "e", "412.1", "412.1")
    assert lost["ph"] == "i"


def test_a_controllers_run_is_on_it_with_every_trained_group_and_every_engine(
    tmp_path: Path,
) -> None:
    trace = TraceFile(tmp_path / "trace.json", Clock(0.0), unix_s=lambda: 1000.0)
    world = World({"steps": 3}, trace=trace)
    world.run()
    assert trace.close(30).left_out == 0
    events = read(tmp_path / "trace.json")
    check(events)
    rollouts = {int(event["id"].split(".")[0]) for event in timed(events) if event["ph"] == "b"}
    assert len(world.trained) == 12
    assert rollouts >= set(world.trained)
    lanes = {"train pump", "generator-0", "generator-1", "0"}
    assert lanes <= {*names(events, "thread_name").values()}


def test_what_overlaps_on_an_engine_is_drawn_on_rows_of_its_own(tmp_path: Path) -> None:
    trace = trace_at(tmp_path / "trace.json")
    for start, end in [(50.0, 51.0), (50.2, 51.2), (50.4, 51.3), (51.0, 52.0)]:
        trace.span(("engine", "generator-0"), "g", start, end)
    trace.close(30)
    events = read(tmp_path / "trace.json")
    check(events)
    rows = ["generator-0", "generator-0 +1", "generator-0 +2"]
    assert list(names(events, "thread_name").values()) == rows


@pytest.mark.parametrize(
    ("times", "facts"),
    [((math.nan, 51.0), {}), ((50.0, math.inf), {}), ((50.0, 51.0), {"handle": object()})],
)
def test_what_cannot_be_written_is_counted_and_the_rest_is_there(
    tmp_path: Path, times: tuple[float, float], facts: Any
) -> None:
    trace = trace_at(tmp_path / "trace.json")
    trace.span(("group", "g-000001"), "bad", *times, **facts)
    trace.span(("pump", "train"), "bad", *times, **facts)
    trace.span(("pump", "train"), "good", 50.0, 51.0, loss=math.nan)
    tally = trace.close(30)
    events = read(tmp_path / "trace.json")
    check(events)
    assert [event["name"] for event in timed(events)] == ["good"]
    assert (tally.written, tally.left_out) == (1, 2)


def test_a_full_spool_and_a_full_file_leave_out_what_comes_and_say_how_much(
    tmp_path: Path,
) -> None:
    spool = trace_at(tmp_path / "spool.json", spooled=3)
    file = trace_at(tmp_path / "file.json", max_events=10)
    for trace, _ in itertools.product((spool, file), range(100)):
        trace.mark(("pump", "train"), "tick", 51.0)
    for trace in (spool, file):
        trace.close(30)
        trace.mark(("pump", "train"), "too late", 51.0)
    assert (spool.tally.written, spool.tally.left_out) == (3, 98)
    events = read(tmp_path / "file.json")
    assert len(events) == 11, "ten, and the one that says how many are missing"
    left_out = events[-1]["args"]["left_out"]
    assert left_out == file.tally.left_out - 1 == 100 - len(timed(events))


# --- crashes and disks ---------------------------------------------------------------------------


@given(st.integers(0, 400))
def test_what_a_crash_leaves_is_the_array_without_its_end_and_is_gone_on_with(torn: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace = trace_at(path)
        for number in range(4):
            trace.span(("pump", "train"), f"first {number}", 50 + number, 51 + number)
        trace.close(30)
        whole = path.read_bytes()
        path.write_bytes(whole[: max(0, len(whole) - torn)])
        kept = read_torn(path)
        again = TraceFile(path, Clock(7.0), unix_s=lambda: 1060.0)
        again.span(("pump", "train"), "second", 8.0, 9.0)
        again.close(30)
        events = read(path)
    check(events)
    assert [event["name"] for event in timed(events)] == [
        *(event["name"] for event in timed(kept)), "second",
    ]  # fmt: skip
    assert timed(events)[-1]["ts"] == (61_000_000 if kept else 1_000_000)


def read_torn(path: Path) -> list[Event]:
    """As a viewer does: up to the last whole line."""
    lines = path.read_text().splitlines(keepends=True)[1:]
    return [json.loads(line.removeprefix(",")) for line in lines if line.endswith("}\n")]


def test_a_live_file_holds_what_was_told_before_the_last_write(tmp_path: Path) -> None:
    pauses = Pauses()
    trace = trace_at(tmp_path / "trace.json", pause=pauses)
    trace.start()
    pauses.next()
    trace.mark(("pump", "train"), "tick", 51.0)
    pauses.go_on.release()
    pauses.next()
    assert json.loads((tmp_path / "trace.json").read_text() + "]")[-1]["name"] == "tick"
    trace.close(30)
    check(read(tmp_path / "trace.json"))


def test_a_disk_that_comes_back_loses_nothing(tmp_path: Path) -> None:
    pauses, home = Pauses(), tmp_path / "run"
    home.write_text("no directory can be made here")
    trace = trace_at(home / "trace.json", pause=pauses)
    trace.start()
    trace.mark(("pump", "train"), "tick", 51.0)
    pauses.next()
    home.unlink()
    tally = trace.close(30)
    assert [event["name"] for event in timed(read(home / "trace.json"))] == ["tick"]
    assert (tally.written, tally.failures) == (1, 1)


def test_a_disk_that_stays_away_costs_the_trace_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory can be made here")
    trace = trace_at(tmp_path / "run" / "trace.json")
    trace.mark(("pump", "train"), "tick", 51.0)
    tally = trace.close(30)
    assert (tally.written, tally.pending) == (0, 1)


def test_a_write_that_broke_in_the_middle_is_made_good_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceJson(path)
    file.open(1000.0)
    with path.open("ab") as half:
        half.write(b',\n{"name":"ha')
    file.append([b'{"name":"whole"}'])
    file.close()
    assert [event["name"] for event in read(path)] == ["offbeat.begin", "whole"]


def test_a_file_of_something_else_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("what is this?\nno trace\n")
    trace = trace_at(tmp_path / "trace.json")
    trace.close(30)
    assert read(tmp_path / "trace.json")
    assert "no trace" in (tmp_path / "trace.json.unreadable").read_text()


def test_a_later_incarnation_has_processes_of_its_own_and_the_same_time_axis(
    tmp_path: Path,
) -> None:
    for incarnation, (loop_s, unix_s) in enumerate([(50.0, 1000.0), (3.0, 1100.0), (9.0, 1200.0)]):
        trace = TraceFile(tmp_path / "trace.json", Clock(loop_s), unix_s=lambda at=unix_s: at)
        trace.span(("pump", "train"), f"incarnation {incarnation}", loop_s, loop_s + 1)
        trace.close(30)
    events = read(tmp_path / "trace.json")
    check(events)
    assert [event["ts"] for event in timed(events)] == [0, 100_000_000, 200_000_000]
    assert len({event["pid"] for event in timed(events)}) == 3
