# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyarrow has no types.
"""Samples in the rollout log: prompts and tokens of groups, and their text."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from offbeat.environments.media_prompts import find_media
from offbeat.messages.bad_json import decode_json
from offbeat.run_files.limited_parquet import read_parquet
from offbeat.run_files.limits import (
    ROLLOUT_BYTES,
    ROLLOUT_FILE_BYTES,
    TOKENIZER_BYTES,
    FileTooLarge,
    NoRegularFile,
    read_limited,
    regular_bytes,
)
from offbeat.runs.inputs import TOKENIZER

_GROUP: Final = "prompt_index"  # the first column of a file
_ANY: Final = 2**63 - 1
_COLUMNS: Final = (
    *("prompt_index", "attempt", "sample", "prompt", "prompt_ids", "response_ids"),
    *("response", "prompt_row", "advantage", "reward", "finish_reason", "oldest_version"),
)
SAMPLE_CHARACTERS: Final = 4000
SAMPLE_TOKENS: Final = 20_000  # tokens of a sample that are decoded

Row = dict[str, Any]
BranchesBySample = Mapping[int, Sequence[Row]]
"""Logged rows of a group: the branches of each sample, in order. Most samples have one branch."""
LoggedGroups = Mapping[tuple[int, int], BranchesBySample]
"""Logged groups by prompt index and attempt."""


class TokenText:
    """Decodes tokens, or writes their ids if the tokenizer is missing."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        if self._tokenizer is None:
            return "".join(f"[{token}]" for token in ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def token_text(run_dir: Path, model_path: str) -> TokenText:
    """Return the decoder of a run.

    It uses the copy of the tokenizer that the run keeps, else the tokenizer next to its exported
    model or at ``model.path``.
    """
    exported = sorted((run_dir / "checkpoints").glob("step_*/tokenizer.json"), reverse=True)
    for path in (run_dir / TOKENIZER, *exported, Path(model_path) / TOKENIZER):
        try:
            text = read_limited(path, TOKENIZER_BYTES).decode()
            tokenizer = Tokenizer.from_str(text)
            if _is_bounded(text, tokenizer):
                return TokenText(tokenizer)
        except Exception:  # noqa: BLE001, S112  tokenizers raises Exception itself for other files
            continue
    return TokenText(None)


_DECODERS: Final = 16
_TOKEN_CHARACTERS: Final = 1000


class _TokenizerFile(msgspec.Struct):
    """The part of a ``tokenizer.json`` that can lengthen text. Other parts are not read."""

    decoder: dict[str, Any] | None = None


def _is_bounded(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the text of tokens has a bound, so that few tokens cannot fill memory.

    The file is not trusted: a chain of decoders could double the text again and again, and a token
    could have megabytes.
    """
    decoders = [decode_json(text.encode(), _TokenizerFile).decoder or {}]
    for each in decoders:  # it grows
        decoders += each.get("decoders", ())
        if len(decoders) > _DECODERS or not _keeps_length(each):
            return False
    return max(map(len, tokenizer.get_vocab()), default=0) <= _TOKEN_CHARACTERS


def _keeps_length(decoder: Mapping[str, Any]) -> bool:
    """Return whether a decoder adds at most one character to a token."""
    match decoder:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return 0 < len(pattern) >= len(content)
        case {"type": "Replace"}:  # a regular expression may also need endless time
            return False
        case {"type": "BPEDecoder", "suffix": replaced}:
            return bool(replaced)
        case {"type": "CTC", "word_delimiter_token": replaced}:
            return bool(replaced)
        case _:
            return True


class RolloutFiles:
    """The rollout files of a run. Metadata of a file is read once, so it is cheap to look again."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "rollouts"
        self._ranges = dict[Path, tuple[int, int] | None]()  # None: without readable metadata

    def find(self, wanted: NDArray[np.int64]) -> tuple[list[Path], int]:
        """Return the files that may contain a wanted group, newest groups first.

        ``wanted`` is ascending. The second value is the number of files without readable metadata.
        """
        found, damaged = list[tuple[int, Path]](), 0
        for path in sorted(self._directory.glob("*.parquet")) if len(wanted) else ():
            if path not in self._ranges:
                self._ranges[path] = _groups_in(path)
            if (groups := self._ranges[path]) is None:
                damaged += 1
                continue
            lowest, highest = groups
            first = np.searchsorted(wanted, lowest)
            if first < len(wanted) and wanted[first] <= highest:
                found.append((highest, path))
        return [path for _, path in sorted(found, reverse=True)], damaged


def read_logged_rows(
    run_dir: Path,
    groups: Iterable[int],
    most_bytes: int = ROLLOUT_BYTES,
    files: RolloutFiles | None = None,
) -> tuple[LoggedGroups, int]:
    """Return the logged rows of these groups, and the number of files that were skipped.

    Only files that may contain one of the groups are read, newest groups first. A file is skipped
    if it is damaged, if it is larger than any file that a run writes, or if the total would exceed
    ``most_bytes``. Pass ``files`` to read metadata only once for many calls.
    """
    wanted = np.array(sorted(groups), dtype=np.int64)
    rows = dict[tuple[int, int], dict[int, list[Row]]]()
    found, skipped = (files or RolloutFiles(run_dir)).find(wanted)
    left = most_bytes
    for path in found:
        try:
            table = _select(path, wanted, min(left, ROLLOUT_FILE_BYTES))
            left -= table.nbytes
            selected = table.to_pylist()
        except (OSError, KeyError, pa.ArrowException, FileTooLarge, NoRegularFile):
            skipped += 1
            continue
        for row in selected:
            by_sample = rows.setdefault((row["prompt_index"], row["attempt"]), {})
            by_sample.setdefault(row["sample"], []).append(row)
    return rows, skipped


def rollout_files(run_dir: Path) -> list[Path]:
    """Return the readable files of a run's samples, the earliest groups first."""
    ranges = ((_groups_in(path), path) for path in (run_dir / "rollouts").glob("*.parquet"))
    found = [(groups[0], path) for groups, path in ranges if groups is not None]
    return [path for _, path in sorted(found)]


def read_columns(path: Path, columns: Iterable[str]) -> Any:  # noqa: ANN401 -- of pyarrow
    """Return these columns of a file, except columns that it lacks.

    Raises the errors of ``read_parquet``.
    """
    return read_parquet(path, columns)


def _groups_in(path: Path) -> tuple[int, int] | None:
    """Return the range of groups according to a file's metadata, or None if it is damaged."""
    try:
        regular_bytes(path)
        return _read_range(pq.read_metadata(path))
    except (OSError, pa.ArrowException, NoRegularFile):
        return None


def _read_range(contents: Any) -> tuple[int, int]:  # noqa: ANN401 -- of pyarrow
    """Return a file's lowest and highest group, or an unlimited range if they are not recorded."""
    lows, highs = list[int](), list[int]()
    for part in map(contents.row_group, range(contents.num_row_groups)):
        if not part.num_columns:
            continue
        column = part.column(0)
        known = column.statistics if column.path_in_schema == _GROUP else None
        if known is None or not known.has_min_max or not isinstance(known.min, int):
            return 0, _ANY
        lows.append(known.min)
        highs.append(known.max)
    return min(lows, default=0), max(highs, default=-1)


def _select(path: Path, wanted: NDArray[np.int64], limit: int) -> Any:  # noqa: ANN401 -- of pyarrow
    """Return the rows of the wanted groups. If there are none, only group numbers are read."""

    def is_wanted(batch: Any) -> Any:  # noqa: ANN401 -- of pyarrow
        return pa.array(np.isin(batch[_GROUP].to_numpy(zero_copy_only=False), wanted))

    table = read_parquet(path, [_GROUP], is_wanted, limit)
    if len(table):
        columns = [*_COLUMNS, find_media().PREVIEW_COLUMN]
        table = read_parquet(path, columns, is_wanted, limit)
    return table


def read_prompt(rows: BranchesBySample | None, text: TokenText) -> str | None:
    """Return the prompt of a group as text, or None if nothing was logged."""
    if not rows:
        return None
    row = next(iter(rows.values()))[0]
    prompt = row["prompt"] or text.of((row["prompt_ids"] or [])[:SAMPLE_TOKENS])
    return prompt[:SAMPLE_CHARACTERS]
