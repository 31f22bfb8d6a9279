import asyncio
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from offbeat.messages.groups import Prompt, Receipt, RolloutTask, SampleFailure, SampleStatus
from offbeat.rollouts.log_table import ROW_CHARACTERS, build_table, rest_of_row
from offbeat.rollouts.rollout_log import LoggedGroup, RolloutLog, file_wait_s

pytestmark = pytest.mark.real_clock


def finished(prompt_index: int) -> tuple[RolloutTask, Receipt, dict[str, np.ndarray]]:
    """Two samples, [7] and [8, 9], the second across a weight update."""
    prompt = Prompt(prompt_index, 0, 5, {"prompt": "1+1="})
    task = RolloutTask(prompt, 1, 2, "generator-0", 0, 1.0)
    receipt = Receipt(
        prompt_index=prompt_index,
        attempt=1,
        engine="generator-0",
        engine_incarnation="x",
        rewards=(0.0, 1.0),
        prompt_tokens=(2, 2),
        response_tokens=(1, 2),
        valid_tokens=(1, 2),
        finish_reasons=("stop", "length"),
        version_spans=(((3, 1),), ((3, 1), (4, 1))),
        columns=(),
        payload_bytes=0,
        kept_kv=(0, 1),
        statuses=(SampleStatus.MASKED, SampleStatus.VALID),
        failures=(SampleFailure.MODEL, SampleFailure.NONE),
        retries=(1, 0),
        turns=(2, 1),
    )
    columns = {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.array([7, 8, 9], np.int32),
        "response_offsets": np.array([0, 1, 3], np.int64),
    }
    return task, receipt, columns


def logged(
    directory: Path, groups: int, *, incarnation: str = "environment-0-7-a"
) -> list[dict[str, object]]:
    async def main() -> None:
        log = RolloutLog(directory, incarnation, groups_per_file=2)
        for prompt_index in range(groups):
            log.add(*finished(prompt_index))
        await log.close()

    asyncio.run(main())
    rows = [row for path in directory.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["prompt_index"], row["sample"]))


def test_every_sample_is_one_row_with_its_text_tokens_reward_and_versions(tmp_path: Path) -> None:
    rows = logged(tmp_path, 1)
    assert [row["response_ids"] for row in rows] == [[7], [8, 9]]
    assert [row["reward"] for row in rows] == [0.0, 1.0]
    assert [(row["oldest_version"], row["newest_version"]) for row in rows] == [(3, 3), (3, 4)]
    assert [row["kept_kv"] for row in rows] == [0, 1]
    assert rows[0]["prompt"] == "1+1="
    assert [row["status"] for row in rows] == ["masked", "valid"]
    assert [row["failure"] for row in rows] == ["model", "none"]
    assert [(row["retries"], row["turns"]) for row in rows] == [(1, 2), (0, 1)]


def test_what_a_row_has_besides_its_prompt_is_logged_as_text_whatever_it_is() -> None:
    task, receipt, columns = finished(0)
    assert build_table([LoggedGroup(task, receipt, columns)])["prompt_row"].to_pylist() == [
        None,
        None,
    ]
    data = {"prompt": "1+1=", "messages": [], "answer": 2, "when": object, "odd": "\ud800é"}
    prompt = msgspec.structs.replace(task.prompt, data=data)
    with_row = msgspec.structs.replace(task, prompt=prompt)
    (text, again) = build_table([LoggedGroup(with_row, receipt, columns)])["prompt_row"].to_pylist()
    assert text == again == '{"answer": 2, "when": "<class \'object\'>", "odd": "?é"}'
    assert len(rest_of_row({"answer": "x" * 10_000}) or "") == ROW_CHARACTERS


def test_responses_and_advantages_stand_beside_the_tokens_whatever_their_characters() -> None:
    group = LoggedGroup(*finished(0), texts=("7</s>", "\ud800é"), advantages=(0.0, 0.5))
    rows = build_table([group]).to_pylist()
    assert [(row["response"], row["advantage"]) for row in rows] == [("7</s>", 0.0), ("?é", 0.5)]
    (one, _) = build_table([LoggedGroup(*finished(0))]).to_pylist()
    assert (one["response"], one["advantage"]) == (None, None)


def test_every_branch_of_a_sample_is_a_row_of_its_own() -> None:
    task, receipt, columns = finished(0)
    one = {"rewards": (1.0,), "version_spans": (((3, 3),),), "turns": (2,), "branches": (2,)}
    merged = msgspec.structs.replace(
        receipt, **one, finish_reasons=("stop",), kept_kv=(), statuses=(), failures=(), retries=()
    )
    rows = build_table([LoggedGroup(task, merged, columns)]).to_pylist()
    assert [row["response_ids"] for row in rows] == [[7], [8, 9]]
    assert [(row["sample"], row["branch"], row["reward"]) for row in rows] == [
        (0, 0, 1.0),
        (0, 1, 1.0),
    ]


def test_files_fill_up_and_the_last_one_holds_the_rest(tmp_path: Path) -> None:
    assert len(logged(tmp_path, 5)) == 10
    assert len(list(tmp_path.iterdir())) == 3


def test_a_disk_that_refuses_costs_the_log_and_nothing_else(tmp_path: Path) -> None:
    taken = tmp_path / "rollouts"
    taken.write_text("a file where the directory should be")
    assert logged(taken, 3) == []


def test_a_later_incarnation_with_the_same_process_id_overwrites_nothing(tmp_path: Path) -> None:
    logged(tmp_path, 1, incarnation="environment-0-7-a")
    assert len(logged(tmp_path, 1, incarnation="environment-0-7-b")) == 4


def large(prompt_index: int, tokens: int) -> tuple[RolloutTask, Receipt, dict[str, np.ndarray]]:
    """A group of two samples with so many response tokens."""
    task, receipt, columns = finished(prompt_index)
    columns["response_ids"] = np.zeros(tokens, np.int32)
    columns["response_offsets"] = np.array([0, 1, tokens], np.int64)
    return task, receipt, columns


async def test_a_file_ends_with_its_bytes_however_few_groups_it_has(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "incarnation", file_bytes=4000)
    for prompt_index in range(6):
        log.add(*large(prompt_index, 600))
    await log.close()
    assert log.not_logged == 0
    assert len(list(tmp_path.glob("*.parquet"))) == 3


def test_a_file_is_written_in_time_although_it_is_not_full(tmp_path: Path) -> None:
    async def files_after_a_pause(name: str, least_s: float) -> int:
        log = RolloutLog(tmp_path / name, "incarnation", file_waits_s=(least_s, 600.0))
        log.add(*finished(0))
        log.add(*finished(1))
        for _ in range(3):  # turns of the loop, so that a timer that is due can act
            await asyncio.sleep(0)
        log.add(*finished(2))
        await log.close()
        return len(list((tmp_path / name).glob("*.parquet")))

    assert asyncio.run(files_after_a_pause("at-once", 0.0)) == 2
    assert asyncio.run(files_after_a_pause("later", 30.0)) == 1


def test_files_of_a_run_of_weeks_are_not_too_many() -> None:
    age_s, files = 0.0, 0
    while age_s < 14 * 24 * 3600:
        age_s, files = age_s + file_wait_s(age_s), files + 1
    assert (file_wait_s(0.0), files < 2500) == (30.0, True)


async def test_groups_beyond_the_bound_of_bytes_are_counted_and_said(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "incarnation", file_bytes=4000, held_bytes=8000)
    with capture_logs() as lines:
        for prompt_index in range(20):  # within one turn of the loop: no file can end meanwhile
            log.add(*large(prompt_index, 600))
            assert log.held_bytes <= 8000
        await log.close()
    assert log.not_logged == 17
    told = [line["groups"] for line in lines if line["event"] == "rollouts.not_logged"]
    assert (told[0], told[-1]) == (1, 17)
    assert log.held_bytes == 0
    rows = [pq.read_table(path).num_rows for path in tmp_path.glob("*.parquet")]
    assert sum(rows) == 3 * 2


async def test_a_log_whose_disk_is_free_again_goes_on(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "incarnation", groups_per_file=1, held_bytes=5000)
    for prompt_index in range(3):
        log.add(*large(prompt_index, 600))
    assert log.not_logged == 1
    await log.close()
    assert log.held_bytes == 0

    again = RolloutLog(tmp_path, "other", groups_per_file=1, held_bytes=10)
    again.add(*large(9, 600))
    await again.close()
    assert again.not_logged == 0, "one group is held, however large it is"


def test_a_group_is_held_without_the_reply_that_it_was_a_part_of(tmp_path: Path) -> None:
    reply = np.zeros(100_000, np.int32)
    released = weakref.ref(reply)

    async def main() -> None:
        nonlocal reply
        log = RolloutLog(tmp_path, "incarnation")
        task, receipt, columns = finished(0)
        columns["response_ids"] = reply[:3]
        log.add(task, receipt, columns)
        del columns, reply
        assert released() is None
        await log.close()

    asyncio.run(main())


async def test_a_disk_that_refuses_is_counted(tmp_path: Path) -> None:
    taken = tmp_path / "rollouts"
    taken.write_text("a file where the directory should be")
    log = RolloutLog(taken, "incarnation", groups_per_file=2)
    for prompt_index in range(3):
        log.add(*finished(prompt_index))
    await log.close()
    assert log.not_logged == 3
