"""`offbeat retrain`: which steps, groups and results of a run are its record."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from offbeat.controller.events import (
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Dropped,
    DropReason,
    Joined,
    Released,
    Rewound,
    StepApplied,
    StepRefused,
    Unclaimed,
)
from offbeat.messages.failures import Component
from offbeat.messages.groups import Receipt
from offbeat.messages.training import StepResult
from offbeat.plugins.retrain.comparison import (
    Compared,
    Reproduced,
    comparable,
    header,
    metric_difference,
    table_row,
)
from offbeat.plugins.retrain.errors import CannotRetrain, RecordDamaged
from offbeat.plugins.retrain.recording import RecordedColumns, RecordedStep, fold_steps, read_rows
from offbeat.plugins.retrain.retraining import find_start
from offbeat.telemetry.records import MetricRecord, encode_line
from offbeat.transfer_queue.spool import FOLDER, SpoolWriter
from tests.support.ledger_model import receipt

EVER = float("inf")


def committed(*groups: int, attempt: int = 1) -> list[AnyEvent]:
    return [Committed(receipt(group, attempt)) for group in groups]


def applied(version: int, attempt: int, *groups: int) -> StepApplied:
    return StepApplied(version, attempt, version, groups, frontier=10)


def trained(version: int, attempt: int, *chunks: tuple[int, ...]) -> list[AnyEvent]:
    claims = [Claimed(version, attempt, chunk) for chunk in chunks]
    groups = [group for chunk in chunks for group in chunk]
    return [*claims, applied(version, attempt, *groups)]


def chunks_of(step: RecordedStep) -> list[list[tuple[int, int]]]:
    """Prompt index and attempt of each group, by chunk."""
    return [[(each.prompt_index, each.attempt) for each in chunk] for chunk in step.chunks]


def test_a_step_has_its_groups_in_the_order_of_its_chunks() -> None:
    events = [*committed(0, 1, 2, 3), *trained(1, 7, (2, 0), (3,)), *trained(2, 8, (1,))]
    found = fold_steps(events, 0, EVER)
    assert [chunks_of(each) for each in found.steps.values()] == [
        [[(2, 1), (0, 1)], [(3, 1)]],
        [[(1, 1)]],
    ]
    assert found.newest == 2


def test_only_the_attempt_that_was_applied_counts() -> None:
    aborted = [Claimed(1, 7, (1, 0)), Unclaimed(1, 7)]
    found = fold_steps([*committed(0, 1), *aborted, *trained(1, 8, (0,), (1,))], 0, EVER)
    assert chunks_of(found.steps[1]) == [[(0, 1)], [(1, 1)]]


def test_a_refused_step_and_its_dropped_groups_are_no_part_of_the_record() -> None:
    refused = [Claimed(1, 7, (0,)), StepRefused(1, 7, "loss is nan")]
    dropped = Dropped(1, DropReason.DATA)
    found = fold_steps([*committed(0, 1, 2), *refused, dropped, *trained(1, 8, (2,))], 0, EVER)
    assert chunks_of(found.steps[1]) == [[(2, 1)]]


def test_a_rewind_removes_steps_checkpoints_and_releases_and_the_groups_come_again() -> None:
    first = [
        *committed(0, 1),
        *trained(1, 7, (0,)),
        Released(1, "of 1"),
        *trained(2, 8, (1,)),
        Checkpointed(2, "lost"),
        Released(2, "lost"),
    ]
    again = [*committed(1, attempt=2), *trained(2, 9, (1,)), Released(2, "of 2")]
    undone = fold_steps([*first, Rewound(1, 1, "")], 0, EVER)
    assert (list(undone.steps), undone.checkpoints, undone.newest) == ([1], {}, 1)
    found = fold_steps([*first, Rewound(1, 1, ""), *again], 0, EVER)
    assert chunks_of(found.steps[2]) == [[(1, 2)]]
    assert found.releases == {1: "of 1", 2: "of 2"}


def test_only_the_wanted_versions_are_kept() -> None:
    events = [*committed(0, 1, 2), *trained(1, 7, (0,)), *trained(2, 8, (1,)), *trained(3, 9, (2,))]
    found = fold_steps(events, 1, 2)
    assert (list(found.steps), found.newest) == ([2], 3)


def test_the_digest_of_the_initial_weights_is_the_trainers() -> None:
    events: list[AnyEvent] = [
        Joined(Component.TRAINER, "trainer", "a", "own"),
        Joined(Component.ENGINE, "generator-0", "b", "other"),
    ]
    assert fold_steps(events, 0, EVER).initial_weights == "own"


def test_the_row_of_a_rewound_step_is_the_later_one(tmp_path: Path) -> None:
    rows = [(1, 0.1), (2, 0.2), (2, 0.3), (3, 0.4)]
    lines = [encode_line(MetricRecord(v, v, 0.0, {"train/loss": loss})) for v, loss in rows]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"torn')
    assert read_rows(tmp_path, (1, 2)) == {1: {"train/loss": 0.1}, 2: {"train/loss": 0.3}}


def spooled(run_dir: Path, group: int) -> Receipt:
    columns = {"response_ids": np.arange(group, group + 5, dtype=np.int32)}
    place = SpoolWriter(run_dir / FOLDER, "environment-0", "1-a").write(columns)
    return msgspec.structs.replace(receipt(group, 1), spooled=place)


def test_recorded_columns_come_back_byte_for_byte(tmp_path: Path) -> None:
    recorded = spooled(tmp_path, 3)
    columns = RecordedColumns(tmp_path)
    columns.check([RecordedStep(1, 1, ((recorded,),))])
    assert columns.read(1, recorded)["response_ids"].tolist() == [3, 4, 5, 6, 7]


def test_a_changed_sample_is_found_by_its_step_and_group(tmp_path: Path) -> None:
    recorded = spooled(tmp_path, 3)
    (segment,) = (tmp_path / FOLDER).iterdir()
    changed = bytearray(segment.read_bytes())
    changed[-1] ^= 1
    segment.write_bytes(changed)
    with pytest.raises(RecordDamaged, match="step 4: recorded samples of g-000003"):
        RecordedColumns(tmp_path).read(4, recorded)


def test_a_group_that_was_not_recorded_is_named_with_the_key_that_records_it(
    tmp_path: Path,
) -> None:
    there, gone = spooled(tmp_path, 3), receipt(8, 1)
    steps = [RecordedStep(4, 4, ((there,),)), RecordedStep(5, 5, ((gone,),))]
    with pytest.raises(CannotRetrain, match=r"step 5: the tokens of g-000008 .*spool=keep"):
        RecordedColumns(tmp_path).check(steps)
    for segment in (tmp_path / FOLDER).iterdir():
        segment.unlink()
    with pytest.raises(CannotRetrain, match="step 4: the tokens of g-000003"):
        RecordedColumns(tmp_path).check(steps)


@pytest.mark.parametrize(
    ("wanted", "version"), [(0, 0), (3, 0), (4, 4), (7, 4), (12, 12), (99, 12)]
)
def test_the_start_is_the_newest_whole_checkpoint_at_or_before_the_step(
    tmp_path: Path, wanted: int, version: int
) -> None:
    for name in ("state_4", "state_12", "step_7", "abandoned_6", "state_5.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    start = find_start(tmp_path, wanted)
    assert start.version == version
    assert ("newest state" in start.describe(wanted)) == (version != wanted)


def result(**changes: object) -> StepResult:
    whole = StepResult(
        applied=True,
        loss=0.5,
        grad_norm=1.5,
        learning_rate=1e-3,
        tokens=10,
        sequences=4,
        chunks=2,
        metrics={
            "train/entropy": 0.7,
            "memory/peak_train_bytes": 9.0,
            "cpu/trainer_s": 2.0,
            "train/bridge_s": 1.0,
            "train/clip_fraction_low": 0.25,
            "train/clip_fraction_high": 0.5,
        },
        compute_s=3.0,
        speed={"throughput/mfu": 0.5},
    )
    return msgspec.structs.replace(whole, **changes)


def test_time_and_memory_are_not_compared() -> None:
    assert list(comparable(result())) == [
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens",
        "train/sequences",
        "train/chunks",
        "train/entropy",
        "train/clip_fraction_low",
        "train/clip_fraction_high",
    ]


def test_a_difference_of_the_last_bit_is_one_and_nan_equals_nan() -> None:
    recorded = {"train/loss": 0.1, "train/grad_norm": float("nan"), "train/reward": 1.0}
    retrained = {"train/loss": 0.1 + 2**-56, "train/grad_norm": float("nan"), "train/new": 0.0}
    found = list(metric_difference(recorded, retrained))
    assert [(each.what, bool(each.difference)) for each in found] == [
        ("train/loss", True),
        ("train/grad_norm", False),
    ]
    assert "recorded 0.1, retrained 0.10000000000000002" in found[0].difference


def test_another_rate_names_the_resume_that_may_have_changed_it() -> None:
    (found,) = metric_difference({"train/learning_rate": 1.0}, {"train/learning_rate": 2.0})
    assert "resume" in found.difference and "--from" in found.difference


def test_the_summary_counts_metrics_by_step_and_weights_by_kind() -> None:
    reproduced = Reproduced()
    for _ in range(2):
        reproduced.add(Compared("train/loss"))
        reproduced.add(Compared.digests("weights of the release", "a", "a"))
    assert str(reproduced) == (
        "equal bit for bit: 1 metrics of 2 steps (train/loss, ...); 2 x weights of the release"
    )
    assert "nothing was recorded" in str(Reproduced())


def test_a_row_of_the_table_has_recorded_and_new_values_under_their_titles() -> None:
    recorded = {"train/loss": 0.25, "train/kl_reference": 0.125, "off_policy/behaviour_kl": 9.0}
    row = table_row(7, recorded, comparable(result()), "gradient norm is nan")
    assert row.split() == [
        *("7", "0.25", "0.5", "-", "1.5", "0.125", "-", "-", "0.7", "-", "0.75"),
        *("not", "applied:", "gradient", "norm", "is", "nan"),
    ]
    assert header().split("\n")[1].split() == ["step", *("recorded", "now") * 5]
