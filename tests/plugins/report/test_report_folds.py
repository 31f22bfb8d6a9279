"""What the page of a run is made of: shares of time, columns, lanes, incidents, group rows."""

import base64
import gzip
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    EngineLost,
    Joined,
    Opened,
    Released,
    Retired,
    Returned,
    ReturnKind,
    Rewound,
    Served,
    Spent,
    StepApplied,
    TrainerReplaced,
    UndoneStep,
    WorkerLost,
)
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import Aggregates
from offbeat.messages.failures import Component
from offbeat.plugins.report.group_rows import GroupRows
from offbeat.plugins.report.page import packed
from offbeat.plugins.report.timeline import (
    IncidentKind,
    Timeline,
    covered_shares,
    merged,
    per_interval,
)
from offbeat.runs.applied_steps import (
    AppliedSteps,
    bin_means,
    join_columns,
    last_of_bins,
    read_evaluations,
)
from offbeat.runs.metrics_file import MetricsFile, read_metrics_file
from offbeat.telemetry.records import MetricRecord, encode_line
from tests.support.recorded_runs import RecordedRun, receipt


def test_a_share_is_the_part_of_an_interval_that_spans_cover() -> None:
    spans = [(0.0, 1.0), (2.5, 3.0), (3.5, 5.5)]
    shares = covered_shares(spans, 6.0, 6)
    assert shares == pytest.approx([1, 0, 0.5, 0.5, 1, 0.5])
    assert covered_shares([], 6.0, 3) == pytest.approx([0, 0, 0])
    assert merged([(2.0, 3.0), (0.0, 1.0), (0.5, 2.5)]) == [(0.0, 3.0)]


def test_seconds_in_bins_are_neither_lost_nor_made() -> None:
    first, second = np.array([0.5, 0.5, 0.5], np.float32), np.array([3.0], np.float32)
    seconds = per_interval([(0.0, 2.5, 1.0, first), (4.0, 7.9, 8.0, second)], 8.0, 16)
    assert seconds.sum() == pytest.approx(4.5)
    assert seconds[:4] == pytest.approx([0.25] * 4)
    assert seconds[5:8] == pytest.approx([0, 0, 0]), "nothing between the two stretches"


def unpacked(text: str) -> tuple[Any, bytes]:
    blob = gzip.decompress(base64.b64decode(text))
    (length,) = struct.unpack_from("<I", blob)
    return msgspec.json.decode(blob[4 : 4 + length]), blob[4 + length :]


def column(reference: Any, columns: bytes) -> np.ndarray[Any, Any]:
    kind, offset, count = reference["$"]
    width = int(kind[1])
    planes = np.frombuffer(columns, np.uint8, count * width, offset).reshape(width, count)
    return np.frombuffer(planes.T.tobytes(), f"<{kind}")


def test_columns_come_back_to_four_digits_with_what_is_no_number() -> None:
    numbers = np.array([0.0, 1.0, -123.456, 1e-20, 3e38, np.nan, np.inf, 2.0e9])
    tree, columns = unpacked(packed({"a": [{"b": numbers}], "n": np.arange(300, dtype=np.uint16)}))
    found = column(tree["a"][0]["b"], columns)
    finite = np.isfinite(numbers)
    assert found[finite] == pytest.approx(numbers[finite], rel=2**-13)
    assert np.isnan(found[5]) and np.isposinf(found[6])
    assert column(tree["n"], columns).tolist() == list(range(300))


def test_no_text_of_a_run_stands_in_the_packed_data() -> None:
    text = packed({"name": "</script><img src=x onerror=alert(1)>\u2028"})
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")


# --- time line -----------------------------------------------------------------------------------


def part_of(*events: tuple[float, AnyEvent]) -> Aggregates:
    fold = RunStats()
    for at_s, event in events:
        fold.add(replace(event, unix_s=1_700_000_000.0 + at_s))
    return fold.end_part(1)


def timeline_of(*events: tuple[float, AnyEvent]) -> Timeline:
    return Timeline([part_of(*events)])


def opened(incarnation: int = 1, driver: str = "d") -> Opened:
    return Opened("run-1", incarnation, driver)


def served(engine: str = "generator-0", version: int = 0) -> Served:
    return Served(engine, "a", 1, version, "digest")


def applied(step: int) -> StepApplied:
    return StepApplied(step, 1, step, (step,), step, samples=2, reward=0.5, staleness=((1, 2),))


def losses(engine: str, count: int, *, first_s: float = 2.0) -> list[tuple[float, AnyEvent]]:
    """An engine that is lost and back ``count`` times, every two seconds."""
    pairs = (
        [(at_s, EngineLost(engine, "killed")), (at_s + 1.0, served(engine))]
        for at_s in (first_s + 2.0 * number for number in range(count))
    )
    return [event for pair in pairs for event in pair]


def test_of_very_many_incidents_the_newest_are_listed_and_all_are_counted() -> None:
    timeline = timeline_of(
        (0.0, opened()), (1.0, served()), (1.0, served("generator-1")),
        (1.5, EngineLost("generator-1", "it never came back")), *losses("generator-0", 700),
    )  # fmt: skip
    listed = [each for each in timeline.all_incidents() if each.what is IncidentKind.ENGINE_LOST]
    assert (listed[0].who, listed[0].is_down) == ("generator-1", True)
    assert listed[-1].at_s == 2.0 + 2.0 * 699
    assert len(listed) == 501
    assert timeline.counts[IncidentKind.ENGINE_LOST] == 701
    assert timeline.left_out == 200


def test_a_lane_has_no_more_stretches_than_can_be_drawn() -> None:
    timeline = timeline_of((0.0, opened()), (1.0, served()), *losses("generator-0", 5000))
    lanes = {lane["name"]: lane["down"] for lane in timeline.to_facts()["lanes"]}
    assert 0 < len(lanes["generator-0"]) <= 1200


def test_the_length_of_a_quiet_spell_is_counted_once_for_all_pauses() -> None:
    steps = [(9.0 + 0.1 * number, applied(1 + number)) for number in range(5)]
    timeline = timeline_of((0.0, opened()), (1.0, served()), *steps)
    (spell,) = [each for each in timeline.all_incidents() if each.what is IncidentKind.QUIET]
    assert (spell.at_s, spell.back_s) == (1.0, 9.0)
    assert timeline.quiet_after_s is timeline.quiet_after_s, "it is the median of all steps"


def test_an_engine_is_down_from_its_loss_until_it_serves_again() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, served()),
        (1.0, Dispatched(0, 1, "generator-0", 0)),
        (4.0, EngineLost("generator-0", "it was killed")),
        (4.0, Returned(0, 1, ReturnKind.INFRASTRUCTURE, "engine_lost")),
        (6.0, served()),
        (8.0, Released(0, "digest")),
    )
    (incident,) = timeline.incidents
    assert (incident.what, incident.at_s, incident.back_s) == ("engine lost", 4.0, 6.0)
    lane = next(lane for lane in timeline.lanes() if lane.name == "generator-0")
    assert lane.down == [(4.0, 6.0)]
    assert lane.busy.mean() == pytest.approx(3 / 8)


def test_only_a_process_that_was_lost_and_has_no_successor_is_down() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, served()),
        (1.0, served("generator-1")),
        (1.0, served("generator-2")),
        (2.0, EngineLost("generator-0", "it was killed")),
        (3.0, EngineLost("generator-1", "it was killed")),
        (4.0, EngineLost("generator-2", "it was killed")),
        (5.0, served("generator-1")),
        (6.0, Retired("generator-2", "killed too often")),
        (7.0, Rewound(0, 1, "a test")),
    )
    incidents = timeline.all_incidents()
    assert [each.what for each in incidents if each.back_s is None] == [
        IncidentKind.ENGINE_LOST,
        IncidentKind.ENGINE_RETIRED,
        IncidentKind.REWOUND,
    ]
    assert [each.who for each in incidents if each.is_down] == ["generator-0"]
    assert [each["is_down"] for each in timeline.to_facts()["incidents"]] == [
        each.is_down for each in incidents
    ]


def test_an_engine_is_idle_once_its_last_group_was_dropped_in_flight() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (0.0, served()),
        (0.0, Dispatched(0, 1, "generator-0", 0)),
        (2.0, Dropped(0, DropReason.STALE)),
        (8.0, Released(0, "digest")),
    )
    lane = next(lane for lane in timeline.lanes() if lane.name == "generator-0")
    assert lane.busy.mean() == pytest.approx(2 / 8)


def test_a_lost_trainer_is_back_when_its_new_process_answers() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, Claimed(1, 1, (0,))),
        (2.0, TrainerReplaced("it was killed")),
        (3.0, Rewound(0, 1, "it was killed")),
        (5.0, Joined(Component.TRAINER, "trainer", "b")),
    )
    lost, rewound = timeline.incidents
    assert (lost.what, lost.back_s) == ("trainer lost", 5.0)
    assert (rewound.what, rewound.back_s) == ("rewound", None)
    trainer = next(lane for lane in timeline.lanes() if lane.name == "trainer")
    assert trainer.down == [(2.0, 5.0)]
    assert trainer.busy.sum() == pytest.approx(len(trainer.busy) / 5)


TRAINER_ANEW = (
    TrainerReplaced("the trainer was started anew", found=True),
    Rewound(0, 1, "the trainer was started anew"),
)


def trainer_joined(process: str) -> Joined:
    return Joined(Component.TRAINER, "trainer", process)


def test_the_new_trainer_of_a_resumed_run_is_no_loss_and_is_up_to_the_end() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, trainer_joined("a")),
        (2.0, TrainerReplaced("it was killed")),
        (3.0, trainer_joined("b")),
        (5.0, opened(2, driver="another")),
        (6.0, trainer_joined("c")),
        *((6.0, event) for event in TRAINER_ANEW),
        (9.0, Released(0, "digest")),
    )
    assert timeline.counts[IncidentKind.TRAINER_LOST] == 1
    assert not [each for each in timeline.incidents if each.is_down]
    trainer = next(lane for lane in timeline.lanes() if lane.name == "trainer")
    assert trainer.down == [(2.0, 3.0)]


def test_a_trainer_that_died_between_two_controllers_is_lost_once_and_back() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, trainer_joined("a")),
        (2.0, Released(0, "digest")),
        (5.0, opened(2)),
        (6.0, trainer_joined("b")),
        *((6.0, event) for event in TRAINER_ANEW),
        (9.0, Released(0, "digest")),
    )
    lost = [each for each in timeline.incidents if each.what == "trainer lost"]
    assert [(each.at_s, each.back_s) for each in lost] == [(2.0, 6.0)]
    trainer = next(lane for lane in timeline.lanes() if lane.name == "trainer")
    assert trainer.down == [(2.0, 6.0)]


def test_a_loss_whose_replacement_the_controller_did_not_live_to_see_is_counted_once() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, trainer_joined("a")),
        (2.0, TrainerReplaced("it was killed")),
        (5.0, opened(2)),
        (6.0, trainer_joined("b")),
        *((6.0, event) for event in TRAINER_ANEW),
        (9.0, Released(0, "digest")),
    )
    lost = [each for each in timeline.incidents if each.what == "trainer lost"]
    assert [(each.at_s, each.back_s) for each in lost] == [(2.0, 6.0)]


def worker_joined(process: str) -> Joined:
    return Joined(Component.WORKER, "environment-0", process)


def test_a_worker_has_a_lane_with_the_time_in_which_it_was_lost() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (2.0, worker_joined("a")),
        (4.0, WorkerLost("environment-0", "it was killed")),
        (6.0, worker_joined("b")),
        (8.0, Released(0, "digest")),
    )
    (incident,) = timeline.incidents
    found = incident.what, incident.who, incident.detail, incident.at_s, incident.back_s
    assert found == ("worker lost", "environment-0", "it was killed", 4.0, 6.0)
    lane = timeline.lanes()[-1]
    assert (lane.name, lane.down) == ("environment-0", [(4.0, 6.0)])
    assert lane.busy.mean() == pytest.approx(4 / 8)


def test_a_worker_lives_on_without_its_controller_and_not_without_its_cluster() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (0.0, worker_joined("a")),
        (2.0, opened(2)),
        (3.0, Released(0, "digest")),
        (6.0, opened(3, driver="another")),
        (7.0, worker_joined("b")),
        (8.0, Released(0, "digest")),
    )
    lane = timeline.lanes()[-1]
    assert (lane.name, lane.down) == ("environment-0", [])
    assert lane.busy.mean() == pytest.approx(4 / 8), "up to the last record, and since it answered"


def test_a_replaced_worker_is_seen_in_a_journal_that_has_no_record_of_lost_workers() -> None:
    timeline = timeline_of((0.0, opened()), (1.0, worker_joined("a")), (2.0, worker_joined("b")))
    assert [each.what for each in timeline.incidents] == ["worker replaced"]


def test_nothing_is_up_between_two_controllers_and_a_resume_is_no_loss() -> None:
    timeline = timeline_of(
        (0.0, opened()),
        (1.0, served()),
        (1.0, Dispatched(0, 1, "generator-0", 0)),
        (2.0, Dispatched(1, 1, "generator-0", 0)),
        (5.0, opened(2)),
        (6.0, served()),
        (9.0, opened(3, driver="another")),
        (10.0, served()),
    )
    assert [(each.what, each.at_s, each.back_s) for each in timeline.incidents] == [
        ("controller lost", 2.0, 5.0),
        ("resumed", 6.0, 9.0),
    ]
    lanes = {lane.name: lane for lane in timeline.lanes()}
    assert lanes["controller"].down == [(2.0, 5.0), (6.0, 9.0)]
    assert lanes["generator-0"].busy.sum() == pytest.approx(len(lanes["generator-0"].busy) / 10)


def test_a_pause_without_any_record_is_a_quiet_spell_if_steps_have_none_like_it() -> None:
    events: list[tuple[float, AnyEvent]] = [(0.0, opened()), (5.0, served())]
    events += [(5.0 + 0.1 * step, applied(step)) for step in range(1, 20)]
    events += [(20.0, applied(20))]
    (quiet,) = timeline_of(*events).all_incidents()
    assert (quiet.what, quiet.at_s, quiet.back_s) == ("quiet", pytest.approx(6.9), 20.0)
    slow: list[tuple[float, AnyEvent]] = [(0.0, opened()), (5.0, served())]
    slow += [(5.0 + 30.0 * step, applied(step)) for step in range(1, 20)]
    assert timeline_of(*slow).all_incidents() == [], "steps of half a minute are not an incident"


def test_attributed_time_adds_up_to_the_time_that_a_controller_was_up() -> None:
    spent = Spent(trainer={"compute": 3.0, "sync": 1.0}, engines={"compute": 4.0, "sync": 4.0})
    timeline = timeline_of(
        (0.0, opened()),
        (0.0, served("generator-0")),
        (0.0, served("generator-1")),
        (4.0, spent),
        (6.0, opened(2)),
        (10.0, spent),
    )
    for shares in timeline.attribution().values():
        total = sum(shares.values(), start=np.zeros(150))
        assert total[:60] == pytest.approx(np.ones(60))
        assert total[60:90] == pytest.approx(np.zeros(30)), "between two controllers"
        assert total[90:] == pytest.approx(np.ones(60))


# --- steps and metrics ---------------------------------------------------------------------------


def test_the_journal_decides_which_steps_there_are(tmp_path: Path) -> None:
    events: list[tuple[float, AnyEvent]] = [
        (float(number), applied(number)) for number in (1, 2, 3)
    ]
    steps = AppliedSteps(
        [part_of((0.0, opened()), *events), part_of((4.0, Rewound(1, 1, "x")), (5.0, applied(2)))]
    )
    path = tmp_path / "metrics.jsonl"
    records = [
        MetricRecord(v, v, 0.0, {"a/b": v + extra}) for v, extra in ((2, 0.25), (3, 0), (2, 0.5))
    ]
    path.write_bytes(b"".join(map(encode_line, records)) + b"no record\n" + b'{"torn')
    found = read_metrics_file(path)
    assert found.unreadable == 1
    columns = join_columns(steps.columns(), found)
    assert columns["step"].tolist() == [1, 2]
    assert columns["time"].tolist() == [1.0, 5.0]
    assert columns["samples"].tolist() == [2, 4]
    assert columns["a/b"].tolist() == pytest.approx([np.nan, 2.5], nan_ok=True)
    assert steps.staleness_shares(10)[1].tolist() == [1, 1]


def test_an_evaluation_is_drawn_at_the_version_that_was_scored_also_that_of_the_initial_weights() -> (
    None
):
    steps = AppliedSteps([part_of((0.0, opened()), *((float(n), applied(n)) for n in (1, 2, 3)))])
    records = {
        version: MetricRecord(version, version, 9.0, {"eval/reward": reward})
        for version, reward in ((0, 0.125), (2, 0.5), (7, 1.0))
    }
    found = MetricsFile(evaluations=records)
    scores = read_evaluations(steps.columns(), found)
    assert {name: column.tolist() for name, column in scores.items()} == {
        "step": [0, 2],
        "time": [0.0, 2.0],
        "samples": [0, 4],
        "eval/reward": [0.125, 0.5],
    }, "version 7 was undone by a rewind"
    assert "eval/reward" not in join_columns(steps.columns(), found)


def test_points_are_means_of_equal_runs_of_steps() -> None:
    numbers = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan])
    assert bin_means(numbers, 3).tolist() == pytest.approx([1.0, 4.0, np.nan], nan_ok=True)
    assert last_of_bins(np.arange(6.0), 3).tolist() == [1, 3, 5]
    assert bin_means(numbers, 100) is numbers
    assert join_columns(AppliedSteps([]).columns(), MetricsFile())["step"].tolist() == []


# --- groups --------------------------------------------------------------------------------------


def test_a_row_has_what_the_receipt_says_and_a_rewind_takes_the_step_back(tmp_path: Path) -> None:
    run, rows = RecordedRun(tmp_path), GroupRows()
    record = run.ledger.record
    run.ledger.record = lambda event: (rows.take(event), record(event))[1]
    run.train(run.ready(2))
    assert [row.step for row in rows.rows] == [1, 1]
    first = rows.rows[0]
    assert (first.reward, first.spread, first.tokens) == (0.5, 0.5, 7.0)
    assert (first.oldest, first.span, first.attempts) == (0, 1, 1)
    rows.take(
        Rewound(
            0,
            1,
            "x",
            (UndoneStep(1, (0,), (1,), has_target_step=False, batch_deficit=0, staleness=()),),
        )
    )
    assert [row.step for row in rows.rows] == [0, 1]
    run.close()


def test_groups_worth_an_example_are_those_that_something_happened_to() -> None:

    rows = GroupRows()
    for index in range(1000):
        rows.take(Admitted(index, None))
        rows.take(Dispatched(index, 3 if index == 517 else 1, "generator-0", 0))
        rows.take(Committed(receipt(index, 1, 0)))
    examples = rows.columns().examples(40)
    assert 517 in examples
    assert len(examples) == 40
    assert examples[-1] == 999
    assert GroupRows().columns().examples(40) == []
