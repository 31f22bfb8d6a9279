"""`offbeat why`: the incarnation of a group, as a person would tell it."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from offbeat.controller.events import DropReason, Joined, ReturnKind, WorkerLost
from offbeat.launch.commands.main import app
from offbeat.messages.failures import Component
from offbeat.messages.groups import SampleFailure, SampleStatus
from offbeat.runs.why import why
from tests.support.recorded_runs import RecordedRun, receipt


def offbeat(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path)


def story(run: RecordedRun, group: str) -> list[str]:
    run.close()
    return [moment.what for moment in why(run.run_dir, group).moments]


def logged(run_dir: Path, prompt_index: int, **values: Any) -> None:
    folder = run_dir / "rollouts"
    folder.mkdir()
    row = {
        "prompt_index": prompt_index,
        "attempt": 1,
        "row": 17,
        "prompt_row": json.dumps({"images": ["a\x1b.png", "b.png"]}),
        "pictures": [{"height": 1, "width": 2, "rgb": b"abcdef"}],
        "picture_sizes": [{"height": 32, "width": 24}] * 2,
    }
    plain = dict.fromkeys(row) | {"prompt_index": prompt_index, "attempt": 1, "row": 17}
    pq.write_table(pa.Table.from_pylist([row | values, plain]), folder / "environment-0.parquet")


@pytest.mark.plugins
def test_a_group_tells_which_pictures_its_prompt_had_and_where_they_are(run: RecordedRun) -> None:
    prompt_index = run.ledger.admit(None)
    attempt = run.ledger.dispatch(prompt_index, "generator-1", 0)
    columns = ("response_ids", "media_values")
    run.ledger.commit(replace(receipt(prompt_index, attempt, 0), columns=columns))
    run.close()
    assert "pictures" not in offbeat("why", run.run_dir, prompt_index).stdout
    logged(run.run_dir, prompt_index)
    told = offbeat("why", run.run_dir, prompt_index).stdout
    unwrapped = told.replace("\n  ", " ")
    assert (
        "pictures of attempt 1: 2 of 24 x 32 pixels as the model reads them; row 17 names "
    ) in unwrapped
    assert "b.png; small copies of 1 in rollouts/environment-0.parquet" in unwrapped
    assert "\x1b" not in told
    (told_json,) = json.loads(offbeat("why", run.run_dir, prompt_index, "--json").stdout)[
        "pictures"
    ]
    assert told_json["sizes"] == [[32, 24]] * 2


def test_files_of_rollouts_are_not_read_for_a_group_without_pictures(run: RecordedRun) -> None:
    (prompt_index,) = run.ready(1)
    run.close()
    logged(run.run_dir, prompt_index)
    assert "pictures" not in offbeat("why", run.run_dir, prompt_index).stdout


def test_a_group_that_was_trained_at_the_second_try(run: RecordedRun) -> None:
    ledger = run.ledger
    prompt_index = ledger.admit(1)
    ledger.dispatch(prompt_index, "generator-3", 0)
    ledger.retry(prompt_index, ReturnKind.INFRASTRUCTURE, "engine_lost")
    run.rolled_out(prompt_index, 0)
    run.train([prompt_index])
    ledger.checkpointed(1, "aa")
    ledger.checkpointed(1, "bb")
    run.close()
    text = offbeat("why", run.run_dir, "g-000000").stdout
    assert text == (
        "g-000000 of tiny-1; its journal goes to -\n"
        "event  version  time  what\n"
        "    2        0  -     drawn          for step 1\n"
        "    3        0  -     dispatched     attempt 1 to generator-3, which serves\n"
        "                        version 0\n"
        "    4        0  -     returned       attempt 1: infrastructure, engine_lost\n"
        "    5        0  -     dispatched     attempt 2 to generator-1, which serves\n"
        "                        version 0\n"
        "    6        0  -     committed      attempt 2 from generator-1; rewards 0 1\n"
        "                        (mean 0.5); response tokens 5 to 9; versions 0 to 1;\n"
        "                        finished by stop 1, length 1; 1.5 s in the engine, 0.25\n"
        "                        s in the environment\n"
        "    7        0  -     claimed        step 1, attempt 1\n"
        "    8        0  -     to be applied  step 1, attempt 1: recorded before the call\n"
        "                        to the trainer\n"
        "    9        0  -     trained        step 1, attempt 1, which made version 1\n"
        "   10        1  -     saved          in the checkpoint of version 1\n"
        "now: trained in step 1, which made version 1\n"
    )


@pytest.mark.parametrize(
    ("incarnation", "shown"), [(1, "step 1, attempt 3"), (2, "step 1, attempt 3 of controller 2")]
)
def test_a_step_is_counted_by_its_controller_as_a_person_counts(
    run: RecordedRun, incarnation: int, shown: str
) -> None:
    group = run.ledger.admit(None)
    run.ledger.commit(receipt(group, run.ledger.dispatch(group, "generator-1", 0), 0))
    run.attempts = (incarnation << 32) + 2
    run.train([group])
    run.close()
    told = why(run.run_dir, "g-000000").moments
    assert [each.detail for each in told if each.what == "claimed"] == [shown]


def test_a_group_that_was_lost_with_its_worker_names_the_workers_lost_meanwhile(
    run: RecordedRun,
) -> None:
    ledger = run.ledger
    for worker in ("environment-0", "environment-1", "environment-2"):
        ledger.note(Joined(Component.WORKER, worker, "a"))
    ledger.note(WorkerLost("environment-0", "out of memory"))
    ledger.note(Joined(Component.WORKER, "environment-0", "b"))
    ledger.note(WorkerLost("environment-1", "it does not start"))
    prompt_index = ledger.admit(None)
    ledger.dispatch(prompt_index, "generator-1", 0)
    ledger.note(WorkerLost("environment-2", "killed by signal 9"))
    ledger.retry(prompt_index, ReturnKind.INFRASTRUCTURE, "actor_lost")
    run.close()
    (returned,) = [each for each in why(run.run_dir, "0").moments if each.what == "returned"]
    assert returned.detail == (
        "attempt 1: infrastructure, actor_lost; environment-1 was lost: it does not start; "
        "environment-2 was lost: killed by signal 9"
    )


def test_a_masked_sample_shows_as_masked_with_its_failure(run: RecordedRun) -> None:
    ledger = run.ledger
    group = ledger.admit(None)
    attempt = ledger.dispatch(group, "generator-1", 0)
    masked = replace(
        receipt(group, attempt, 0),
        valid_tokens=(0, 9),
        statuses=(SampleStatus.MASKED, SampleStatus.VALID),
        failures=(SampleFailure.MODEL, SampleFailure.INFRASTRUCTURE),
        retries=(1, 1),
        finish_reasons=("environment_raised", "stop"),
        turns=(2, 4),
        branches=(1, 3),
    )
    ledger.commit(masked)
    run.close()
    (told,) = [
        each.detail for each in why(run.run_dir, "g-000000").moments if "rewards" in each.detail
    ]
    assert "rewards masked 1 (mean 1)" in told
    assert "turns 2 to 4; branches 1 to 3" in told
    assert "sample 0 failed (model), masked after 1 retries" in told
    assert "sample 1 failed (infrastructure), valid after 1 retries" in told


def test_every_moment_has_its_time_and_the_head_says_how_far_the_journal_goes(
    tmp_path: Path,
) -> None:
    times = itertools.count(1795299600.25, 1.5)
    run = RecordedRun(tmp_path, unix_s=lambda: next(times))
    run.ledger.dispatch(run.ledger.admit(1), "generator-3", 0)
    run.ledger.admit(1)
    run.close()
    assert offbeat("why", tmp_path, "0").stdout == (
        "g-000000 of tiny-1; its journal goes to 2026-11-21T22:20:04.750Z\n"
        "event  version  time          what\n"
        "                2026-11-21\n"
        "    2        0  22:20:01.750  drawn       for step 1\n"
        "    3        0  22:20:03.250  dispatched  attempt 1 to generator-3, which serves\n"
        "                                version 0\n"
        "now: in flight on generator-3, attempt 1\n"
    )


def test_a_history_fits_in_80_columns_whatever_its_texts_are_and_names_each_day(
    tmp_path: Path,
) -> None:
    times = itertools.count(1795299600.25, 50_000.0)
    run = RecordedRun(tmp_path, unix_s=lambda: next(times))
    index = run.ledger.admit(1)
    for _ in range(2):
        run.ledger.dispatch(index, "generator-of-another-rack/" * 8, 0)
        run.ledger.retry(index, ReturnKind.INFRASTRUCTURE, "one word after the other " * 12)
    run.close()
    lines = offbeat("why", tmp_path, "0").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if re.fullmatch(r" +2026-11-\d\d", line)]) == 3
    assert sum(line.count("one word after") for line in lines) >= 12


def test_a_rewind_brings_a_trained_group_back(run: RecordedRun) -> None:
    (prompt_index,) = run.ready(1)
    run.train([prompt_index])
    run.rewind(0, "rank 0 was lost")
    incarnation = story(run, str(prompt_index))
    assert incarnation[-3:] == ["to be applied", "trained", "rewound"]
    again = why(run.run_dir, "0")
    assert "lineage 1: rank 0 was lost" in again.moments[-1].detail
    assert again.now == "admitted, to be dispatched as attempt 2"


def test_a_rewind_sends_back_ready_groups_with_abandoned_tokens_only(run: RecordedRun) -> None:
    run.train(run.ready(1))
    (young,) = run.ready(1)
    old = run.ledger.admit(None)
    run.rolled_out(old, 0)
    run.rewind(0, "lost")
    run.close()
    assert why(run.run_dir, str(young)).moments[-1].what == "rewound"
    assert why(run.run_dir, str(young)).now == "admitted, to be dispatched as attempt 2"
    # Its newest token is of version 1, which is abandoned as well.
    assert why(run.run_dir, str(old)).moments[-1].what == "rewound"


def test_an_aborted_step_leaves_its_groups_ready(run: RecordedRun) -> None:
    (prompt_index,) = run.ready(1)
    run.ledger.claim([prompt_index], 1, 1)
    run.ledger.unclaim(1, 1)
    assert story(run, "0")[-2:] == ["claimed", "ready again"]
    assert why(run.run_dir, "0").now == "ready, waits for the trainer; oldest token of version 0"


def test_a_rewind_while_its_step_is_open_is_told(run: RecordedRun) -> None:
    run.train(run.ready(1))
    run.ledger.admit(None)
    run.rolled_out(1, 0)
    run.ledger.claim([1], 2, 2)
    run.rewind(1, "lost")
    assert story(run, "1")[-1] == "rewound"
    assert why(run.run_dir, "1").moments[-1].detail.endswith("its step was open")


@pytest.mark.parametrize(
    ("reason", "what"), [(DropReason.FILTERED, "filtered out"), (DropReason.DATA, "dropped")]
)
def test_a_dropped_group_says_why_and_which_step_goes_without_it(
    run: RecordedRun, reason: DropReason, what: str
) -> None:
    (prompt_index,) = run.ready(1)
    run.ledger.drop(prompt_index, reason, "zero_variance", shrinks=1)
    assert story(run, "0")[-1] == what
    incarnation = why(run.run_dir, "0")
    assert incarnation.moments[-1].detail == "zero_variance; step 1 goes without it"
    assert incarnation.now == f"{what}: zero_variance"


def test_a_step_that_was_not_applied_drops_its_groups(run: RecordedRun) -> None:
    prompt_indices = run.ready(2)
    run.ledger.claim(prompt_indices[:1], 1, 1)
    run.ledger.refused(1, 1, "gradient norm is nan")
    assert story(run, "0")[-1] == "dropped"
    assert why(run.run_dir, "0").now == "dropped: step 1 was not applied (gradient norm is nan)"
    assert why(run.run_dir, "1").now.startswith("ready")


def test_a_new_controller_is_part_of_the_story_of_what_it_took_over(run: RecordedRun) -> None:
    run.ledger.dispatch(run.ledger.admit(None), "generator-0", 0)
    run.close()
    again = RecordedRun(run.run_dir, incarnation=2)
    again.ledger.recover(0, "controller_lost")
    again.ledger.admit(None)
    assert story(again, "0") == ["drawn", "dispatched", "new controller", "returned"]
    assert [moment.what for moment in why(run.run_dir, "1").moments] == ["drawn"]


def test_a_controller_that_another_process_started_is_a_resume(run: RecordedRun) -> None:
    run.ledger.dispatch(run.ledger.admit(None), "generator-0", 0)
    run.close()
    again = RecordedRun(run.run_dir, incarnation=2, driver="another")
    assert story(again, "0") == ["drawn", "dispatched", "resumed"]


@pytest.mark.parametrize(
    ("place", "now"),
    [
        ("in_flight", "in flight on generator-0, attempt 1"),
        ("training", "training, in the open step"),
    ],
)
def test_a_live_group_says_where_it_is(run: RecordedRun, place: str, now: str) -> None:
    if place == "in_flight":
        run.ledger.dispatch(run.ledger.admit(None), "generator-0", 0)
    else:
        run.ledger.claim(run.ready(1), 1, 1)
    run.journal.flush_now()
    assert why(run.run_dir, "0").now == now
    run.close()


def test_a_failed_group_names_the_file_with_its_row_response_and_traceback(
    run: RecordedRun,
) -> None:
    prompt_index = run.ledger.admit(None)
    run.close()
    assert "failures.jsonl" not in offbeat("why", run.run_dir, prompt_index).stdout
    of = {"group": f"g-{prompt_index:06d}", "evaluation": False}
    records = [of, of | {"evaluation": True}, of | {"group": "g-000099"}]
    (run.run_dir / "failures.jsonl").write_text("\n".join(map(json.dumps, records)))
    told = offbeat("why", run.run_dir, prompt_index).stdout
    assert "failures.jsonl has 1 of its failures: row, response and traceback" in told


def test_for_programs_the_same_is_json(run: RecordedRun) -> None:
    run.ready(1)
    run.close()
    told = json.loads(offbeat("why", run.run_dir, "0", "--json").stdout)
    assert (told["group"], len(told["moments"])) == ("g-000000", 3)
    assert told["moments"][0] == {
        "event": 2,
        "unix_s": 0.0,
        "version": 0,
        "what": "drawn",
        "detail": "for any step",
    }


def test_a_group_not_drawn_yet_is_told_with_the_range(run: RecordedRun) -> None:
    run.ready(3)
    run.close()
    result = offbeat("why", run.run_dir, "g-000412")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "offbeat: g-000412 was not drawn yet; those drawn are g-000000 to g-000002\n"
    )


def test_before_the_first_draw_no_group_is_known(run: RecordedRun) -> None:
    run.close()
    assert "no group was drawn yet" in offbeat("why", run.run_dir, "0").stderr


@pytest.mark.parametrize("name", ["", "g-", "412x", "x-412", "g--1"])
def test_what_names_no_group_is_told_how_to_write_one(run: RecordedRun, name: str) -> None:
    run.close()
    result = offbeat("why", run.run_dir, name)
    assert result.exit_code == 2
    assert "Write it as g-000412 or 412" in result.stderr
