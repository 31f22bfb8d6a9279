"""Rollout files with one sample, for tables of samples."""

from pathlib import Path

import pyarrow as pa

from offbeat.environments.media_prompts import find_media
from offbeat.telemetry.preview_column import TYPE


def parquet(run_dir: Path, name: str = "worker-00000") -> Path:
    """The path of a rollout file, in a directory that exists."""
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.parquet"


def logged_table(index: int, *, prompt: str, response: str | None) -> pa.Table:
    """A rollout file of one sample of the group ``index``, in its first attempt."""
    row = {
        "prompt_index": [index],
        "attempt": [1],
        "sample": [0],
        "prompt": [prompt],
        "prompt_ids": [[1]],
        "response_ids": [[2, 3]],
        "response": [response],
        "prompt_row": [None],
        "advantage": [0.0],
        "finish_reason": ["stop"],
    }
    types = {"response": pa.string(), "prompt_row": pa.string()}
    columns = {name: pa.array(values, types.get(name)) for name, values in row.items()}
    return pa.table({**columns, find_media().PREVIEW_COLUMN: pa.array([None], TYPE)})
