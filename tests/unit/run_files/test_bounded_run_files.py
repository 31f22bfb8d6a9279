# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyarrow has no types.
"""Files of a run that are small on disk and large in memory: each is refused before it is large."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.run_files.files import FAILURES, FAILURES_BYTES, count_failures
from offbeat.run_files.limited_parquet import read_parquet
from offbeat.run_files.limits import DamagedFile, FileTooLarge, NoRegularFile, read_json
from offbeat.runs.logged_samples import token_text

REPEATED = "x" * 4000


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    """One long text that a file stores once and has in 1000 rows."""
    path = tmp_path / "000001.parquet"
    rows = {"prompt_index": list(range(1000)), "prompt": [REPEATED] * 1000}
    pq.write_table(pa.table(rows), path, use_dictionary=True)
    return path


def test_repetitions_of_a_text_count_where_a_file_is_read(repeated: Path) -> None:
    assert pq.read_metadata(repeated).row_group(0).total_byte_size < 40_000
    with pytest.raises(FileTooLarge):
        read_parquet(repeated, limit=100_000)
    kept = read_parquet(repeated).nbytes
    with pytest.raises(FileTooLarge):  # read_parquet may read 16 times what it may keep
        read_parquet(repeated, limit=kept // 2)

    def is_first(batch: Any) -> Any:
        return pa.array([index < 3 for index in batch["prompt_index"].to_pylist()])

    few = read_parquet(repeated, keep=is_first, limit=400_000)
    assert few.to_pylist() == [{"prompt_index": n, "prompt": REPEATED} for n in range(3)]
    names = read_parquet(repeated, ["prompt_index", "of an older version"], limit=40_000)
    assert (names.column_names, len(names)) == (["prompt_index"], 1000)


def test_numbers_count_with_their_width_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "000001.parquet"
    pq.write_table(pa.table({"prompt_ids": [[7] * 1000] * 100}), path)
    assert path.stat().st_size < 4000
    with pytest.raises(FileTooLarge, match=r"800,000 bytes"):
        read_parquet(path, limit=700_000)


def tokenizer_file(run_dir: Path, decoders: list[dict[str, Any]], word: str = "a") -> None:
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {word: 0}, "unk_token": word},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    (run_dir / "tokenizer.json").write_text(json.dumps(content))


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("decoder", "times"),
    [
        (replace({"String": "a"}, "aa"), 2),
        (replace({"String": ""}, " "), 2),
        (replace({"Regex": "[^~]"}, "a"), 1),
        (replace({"String": "a"}, "b"), 17),
    ],
    ids=["doubles", "doubles with spaces", "has a regular expression", "is one of very many"],
)
def test_a_decoder_that_can_lengthen_text_is_not_used(
    tmp_path: Path, decoder: dict[str, Any], times: int
) -> None:
    tokenizer_file(tmp_path, [decoder] * times)
    assert token_text(tmp_path, "none").of([0]) == "[0]"


def test_a_token_of_very_many_characters_is_not_used(tmp_path: Path) -> None:
    tokenizer_file(tmp_path, [], "a" * 1001)
    assert token_text(tmp_path, "none").of([0]) == "[0]"


def test_the_decoders_of_known_models_are_used(tmp_path: Path) -> None:
    known = [replace({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer_file(
        tmp_path, [*known, {"type": "Strip", "content": " ", "start": 1, "stop": 0}], "▁a"
    )
    assert token_text(tmp_path, "none").of([0, 0]) == "a a"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": 1}x', '"\ud800"', "[]", "\xff"])
def test_json_that_no_run_writes_is_a_damaged_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(text, encoding="latin-1", errors="backslashreplace")
    with pytest.raises(DamagedFile, match=r"inputs\.json cannot be read"):
        read_json(path, 1 << 20, dict[str, str])


def test_json_nested_without_end_is_a_damaged_file_where_any_value_may_stand(
    tmp_path: Path,
) -> None:
    path = tmp_path / "summary.json"
    path.write_text('{"x":' + "[" * 100_000)
    with pytest.raises(DamagedFile, match=r"summary\.json cannot be read"):
        read_json(path, 1 << 20, dict[str, object])


def test_failures_are_counted_in_a_file_that_a_run_can_have_written(tmp_path: Path) -> None:
    assert count_failures(tmp_path, "g-000000") == 0
    (tmp_path / FAILURES).write_text('{"group": "g-000000", "evaluation": false}\n')
    assert count_failures(tmp_path, "g-000000") == 1
    os.truncate(tmp_path / FAILURES, 3 * FAILURES_BYTES)
    with pytest.raises(FileTooLarge):
        count_failures(tmp_path, "g-000000")
    (tmp_path / FAILURES).unlink()
    os.mkfifo(tmp_path / FAILURES)
    with pytest.raises(NoRegularFile):
        count_failures(tmp_path, "g-000000")
