"""Text of example groups: prompt and responses, shaded by the weight version of each token."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.report.document import example_samples, pictures_of, rest_of
from offbeat.rollouts.log_table import build_table
from offbeat.rollouts.rollout_log import LoggedGroup
from offbeat.run_files.limited_parquet import read_parquet
from offbeat.runs.inputs import keep_tokenizer
from offbeat.runs.logged_samples import TokenText, read_logged_rows, read_prompt, token_text
from tests.support.recorded_runs import receipt

IDS = TokenText(None)


def logged(directory: Path, made: Receipt, branches: list[list[int]]) -> Path:
    """Write one group as a worker does, a row per branch."""
    data = Prompt(made.prompt_index, 0, 0, {"prompt": "1+1=", "answer": 2})
    task = RolloutTask(data, made.attempt, made.samples, made.engine, 0, 60.0)
    columns: dict[str, Any] = {
        "prompt_ids": np.array([1], dtype=np.int32),
        "response_ids": np.concatenate(branches).astype(np.int32),
        "response_offsets": np.cumsum([0, *map(len, branches)]).astype(np.int64),
    }
    (directory / "rollouts").mkdir(exist_ok=True)
    path = directory / "rollouts" / f"{made.prompt_index}-{made.attempt}.parquet"
    pq.write_table(build_table([LoggedGroup(task, made, columns)]), path)
    return path


def spans(directory: Path, made: Receipt) -> list[list[tuple[int, str]]]:
    rows, _ = read_logged_rows(directory, [made.prompt_index])
    found = rows.get((made.prompt_index, made.attempt))
    return [sample.spans for sample in example_samples(made, found, IDS)]


def test_tokens_stand_under_the_version_that_sampled_them(tmp_path: Path) -> None:
    made = receipt(3, 1, 7)  # five tokens of version 7; four of it and five of version 8
    logged(tmp_path, made, [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19]])
    assert spans(tmp_path, made) == [
        [(7, "[1][2][3][4][5]")],
        [(7, "[11][12][13][14]"), (8, "[15][16][17][18][19]")],
    ]
    rows, skipped = read_logged_rows(tmp_path, [3])
    assert (read_prompt(rows[3, 1], IDS), skipped) == ("1+1=", 0)


def test_branches_of_a_sample_stand_one_behind_the_other(tmp_path: Path) -> None:
    made = replace(receipt(3, 1, 7), branches=(2, 1), version_spans=(((7, 2), (8, 3)), ((8, 1),)))
    logged(tmp_path, made, [[1, 2, 3], [4, 5], [6]])
    first, second = spans(tmp_path, made)
    assert first == [(7, "[1][2]"), (8, "[3]"), (8, "\n[4][5]")]
    assert second == [(8, "[6]")]


def test_another_attempt_and_a_group_that_was_not_logged_have_no_text(tmp_path: Path) -> None:
    logged(tmp_path, receipt(3, 1, 0), [[1], [2]])
    retried = receipt(3, 2, 0)
    assert spans(tmp_path, retried) == [[], []]
    assert read_prompt(None, IDS) is None


def test_files_without_a_told_group_take_no_room_and_the_newest_groups_come_first(
    tmp_path: Path,
) -> None:
    for number in range(6):
        path = logged(tmp_path, receipt(number, 1, 7), [[1] * 5, [2] * 9])
    contents = pq.read_metadata(path)
    room = contents.row_group(0).total_byte_size + read_parquet(path).nbytes
    found, left_out = read_logged_rows(tmp_path, [1, 3, 5], most_bytes=room)
    assert ({group for group, _ in found}, left_out) == ({3, 5}, 1)
    found, left_out = read_logged_rows(tmp_path, [1, 3], most_bytes=room)
    assert ({group for group, _ in found}, left_out) == ({1, 3}, 0)


def test_a_file_that_does_not_say_which_groups_it_has_is_read(tmp_path: Path) -> None:
    path = logged(tmp_path, receipt(3, 1, 7), [[1] * 5, [2] * 9])
    pq.write_table(pq.read_table(path), path, write_statistics=False)
    found, left_out = read_logged_rows(tmp_path, [3])
    assert (list(found), left_out) == ([(3, 1)], 0)


def test_a_long_response_is_cut_and_says_so(tmp_path: Path) -> None:
    made = replace(receipt(3, 1, 0), version_spans=(((0, 3000), (1, 3000)), ((0, 1),)))
    logged(tmp_path, made, [list(range(6000)), [1]])
    rows, _ = read_logged_rows(tmp_path, [3])
    long, short = example_samples(made, rows[3, 1], IDS)
    assert sum(len(text) for _, text in long.spans) == 4000
    assert (long.is_cut, short.is_cut) == (True, False)


def test_a_group_is_shown_with_the_rest_of_its_row_and_without_where_an_older_log_has_none(
    tmp_path: Path,
) -> None:
    made = receipt(3, 1, 7)
    path = logged(tmp_path, made, [[7], [8]])
    rows, _ = read_logged_rows(tmp_path, [3])
    assert rest_of(rows[3, 1]) == '{"answer": 2}'
    older = pq.read_table(path).drop_columns(["prompt_row"])
    pq.write_table(older, path)
    rows, skipped = read_logged_rows(tmp_path, [3])
    assert (rest_of(rows[3, 1]), rest_of(None), skipped) == (None, None, 0)


def test_the_tokenizer_is_the_run_s_copy_or_that_of_its_exported_model_or_recipe(
    tmp_path: Path,
) -> None:
    model = Path(__file__).parents[3] / "models" / "tiny-addition"
    assert token_text(tmp_path, str(model)).of([5]) != "[5]"
    assert token_text(tmp_path, "no/such/model").of([5, 6]) == "[5][6]"
    broken = tmp_path / "checkpoints" / "step_3"
    broken.mkdir(parents=True)
    (broken / "tokenizer.json").write_text("{}")
    assert token_text(tmp_path, str(model)).of([5]) != "[5]"
    keep_tokenizer(model, tmp_path)
    assert token_text(tmp_path, "no/such/model").of([5]) != "[5]"


def test_a_group_is_shown_with_small_copies_of_its_pictures(tmp_path: Path) -> None:
    made = receipt(3, 1, 7)
    path = logged(tmp_path, made, [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19]])
    assert pictures_of(read_logged_rows(tmp_path, [3])[0][3, 1]) == []
    rows = pq.read_table(path).to_pylist()
    rows[0]["pictures"] = [{"height": 1, "width": 2, "rgb": b"abcdef"}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    shown = pictures_of(read_logged_rows(tmp_path, [3])[0][3, 1])
    assert shown == [{"height": 1, "width": 2, "rgb": "YWJjZGVm"}]
    assert pictures_of(None) == []


@pytest.mark.parametrize(
    "pictures",
    [
        None,
        "<img src=x>",
        [{"height": 1, "width": 2, "rgb": b"abcde"}],
        [{"height": 0, "width": 2, "rgb": b""}],
        [{"height": 1, "width": 97, "rgb": b"a" * 291}],
        [{"height": 2**31, "width": 2**31, "rgb": b"abc"}],
        [{"height": None, "width": 1, "rgb": b"abc"}],
        [{"height": 1, "width": 1}],
        ["<svg/>"],
    ],
)
def test_a_file_that_no_run_has_written_shows_no_picture(pictures: object) -> None:
    assert pictures_of({0: [{"pictures": pictures}]}) == []
