"""Writes logged groups to a Parquet file, one row per branch of a sample."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false
# pyarrow has no types.

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from offbeat.environments.media_prompts import find_media
from offbeat.messages.groups import SampleFailure, SampleStatus
from offbeat.rollouts.rollout_log import LoggedGroup
from offbeat.run_files.files import Files
from offbeat.run_files.transfer import send
from offbeat.transfer_queue.schema import PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS

log = structlog.stdlib.get_logger()
ROW_CHARACTERS: Final = 4096  # of a row's other keys, for each of its samples


def write_groups(path: Path, rows: list[LoggedGroup], files: Files | None) -> int:
    """Write one file and return the number of groups lost to disk errors."""
    beside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # pyarrow would follow a link
        pq.write_table(build_table(rows), beside)
        if files is None:
            beside.replace(path)
        else:
            send(files, beside, path.parent.name, path.name)
            beside.unlink()
    except (OSError, pa.ArrowException) as error:
        log.warning("rollouts.not_written", path=str(path), groups=len(rows), error=str(error))
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        return len(rows)
    return 0


def build_table(rows: list[LoggedGroup]) -> pa.Table:
    """Return a table with one row per branch of a sample. Most samples have one branch.

    ``response`` and ``response_ids`` belong to the branch, the other fields to the sample. The
    prompt is text if the row has text. ``prompt_row`` holds the rest of the row, such as the
    answer. The step that trains a group is not known yet; the journal will have it.
    """
    media_fields = find_media().log_columns()
    fields = {**_FIELDS, **media_fields}
    columns: dict[str, list[Any]] = {name: [] for name in fields}
    for task, receipt, packed, media, texts, advantages in rows:
        offsets = packed[RESPONSE_OFFSETS].tolist()
        responses = packed[RESPONSE_IDS]
        branches = receipt.branches or (1,) * receipt.samples
        rest = rest_of_row(task.prompt.data)
        of_rows = ((sample, at) for sample, count in enumerate(branches) for at in range(count))
        for row, (sample, branch) in enumerate(of_rows):
            spans = receipt.version_spans[sample]
            values = (
                receipt.prompt_index,
                receipt.attempt,
                sample,
                receipt.engine,
                task.prompt.epoch,
                task.prompt.row,
                task.prompt.data.get("prompt"),
                packed[PROMPT_IDS],
                responses[offsets[row] : offsets[row + 1]],
                _as_utf8(texts[row]) if texts else None,
                receipt.rewards[sample],
                advantages[sample] if advantages else None,
                receipt.finish_reasons[sample],
                min(version for version, _ in spans),
                max(version for version, _ in spans),
                receipt.kept_kv[sample] if receipt.kept_kv else 0,
                receipt.statuses[sample] if receipt.statuses else SampleStatus.VALID,
                receipt.failures[sample] if receipt.failures else SampleFailure.NONE,
                receipt.retries[sample] if receipt.retries else 0,
                receipt.turns[sample] if receipt.turns else 1,
                [(name, values[sample]) for name, values in receipt.rewards_by_name],
                branch,
                receipt.environment,
                rest,
            )
            for name, value in zip(_FIELDS, values, strict=True):
                columns[name].append(value)
            for name in media_fields:  # only in the first row of a group
                columns[name].append(None if row else media.get(name))
    return pa.table(columns, schema=pa.schema(list(fields.items())))


_FIELDS: Final = {
    "prompt_index": pa.int64(),
    "attempt": pa.int32(),
    "sample": pa.int32(),
    "engine": pa.string(),
    "epoch": pa.int32(),
    "row": pa.int64(),
    "prompt": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "response_ids": pa.list_(pa.int32()),
    "response": pa.string(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "finish_reason": pa.string(),
    "oldest_version": pa.int64(),
    "newest_version": pa.int64(),
    "kept_kv": pa.int32(),
    "status": pa.string(),
    "failure": pa.string(),
    "retries": pa.int32(),
    "turns": pa.int32(),
    "rewards_by_name": pa.map_(pa.string(), pa.float64()),
    "branch": pa.int32(),  # 0 of the first branch of each sample
    "environment": pa.string(),
    "prompt_row": pa.string(),  # JSON, cut
}


def rest_of_row(data: Mapping[str, Any]) -> str | None:
    """Return a prompt's row, without its text, as JSON, cut to ``ROW_CHARACTERS``."""
    shown = find_media().without_content(data).items()
    rest = {key: value for key, value in shown if key not in {"prompt", "messages"}}
    if not rest:
        return None
    return _as_utf8(json.dumps(rest, ensure_ascii=False, default=str)[:ROW_CHARACTERS])


def _as_utf8(text: str) -> str:
    """Return the text with a question mark for each lone surrogate, because UTF-8 has none."""
    return text.encode(errors="replace").decode()
