import asyncio
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from offbeat.actors.environment_worker.rollout_log import RolloutLog
from offbeat.messages.groups import Prompt, Receipt, RolloutTask


def finished(ordinal: int) -> tuple[RolloutTask, Receipt, dict[str, np.ndarray]]:
    """Two samples, [7] and [8, 9], the second across a weight update."""
    prompt = Prompt(ordinal, 0, 5, {"prompt": "1+1="})
    task = RolloutTask(prompt, 1, 2, "generator-0", 0, 1.0)
    receipt = Receipt(
        ordinal=ordinal,
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
    )
    columns = {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.array([7, 8, 9], np.int32),
        "response_offsets": np.array([0, 1, 3], np.int64),
    }
    return task, receipt, columns


def logged(
    directory: Path, groups: int, *, life: str = "environment-0-7-a"
) -> list[dict[str, object]]:
    async def main() -> None:
        log = RolloutLog(directory, life, groups_per_file=2)
        for ordinal in range(groups):
            log.add(*finished(ordinal))
        await log.close()

    asyncio.run(main())
    rows = [row for path in directory.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["ordinal"], row["sample"]))


def test_every_sample_is_one_row_with_its_text_tokens_reward_and_versions(tmp_path: Path) -> None:
    rows = logged(tmp_path, 1)
    assert [row["response_ids"] for row in rows] == [[7], [8, 9]]
    assert [row["reward"] for row in rows] == [0.0, 1.0]
    assert [(row["oldest_version"], row["newest_version"]) for row in rows] == [(3, 3), (3, 4)]
    assert [row["kept_kv"] for row in rows] == [0, 1]
    assert rows[0]["prompt"] == "1+1="


def test_files_fill_up_and_the_last_one_holds_the_rest(tmp_path: Path) -> None:
    assert len(logged(tmp_path, 5)) == 10
    assert len(list(tmp_path.iterdir())) == 3


def test_a_disk_that_refuses_costs_the_log_and_nothing_else(tmp_path: Path) -> None:
    taken = tmp_path / "rollouts"
    taken.write_text("a file where the directory should be")
    assert logged(taken, 3) == []


def test_a_later_life_with_the_same_process_id_overwrites_nothing(tmp_path: Path) -> None:
    logged(tmp_path, 1, life="environment-0-7-a")
    assert len(logged(tmp_path, 1, life="environment-0-7-b")) == 4
