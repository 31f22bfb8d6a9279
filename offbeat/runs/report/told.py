# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyarrow has no types.
"""Text and history of the groups that the page tells: prompt, responses by version, moments."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from offbeat.messages.groups import Receipt
from offbeat.runs.report.limits import (
    ROLLOUT_BYTES,
    ROLLOUT_FILE_BYTES,
    TOKENIZER_BYTES,
    FileTooLarge,
    read_limited,
)

_COLUMNS: Final = ("prompt_index", "attempt", "sample", "prompt", "prompt_ids", "response_ids")
_SAMPLE_CHARACTERS: Final = 4000
_SAMPLES: Final = 64  # of a group
_TOKENS: Final = 20_000  # of a sample that are decoded

Row = dict[str, Any]
Samples = dict[tuple[int, int], dict[int, Row]]
"""Logged rows by group and attempt, then by sample."""


class TokenText:
    """Decodes tokens; without a tokenizer it writes their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        if self._tokenizer is None:
            return "".join(f"[{token}]" for token in ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def token_text(run_dir: Path, model_path: str) -> TokenText:
    """Return the decoder of a run: the tokenizer beside its exported model, or at ``model.path``."""
    exported = sorted((run_dir / "checkpoints").glob("step_*/tokenizer.json"), reverse=True)
    for path in (*exported, Path(model_path) / "tokenizer.json"):
        try:
            text = read_limited(path, TOKENIZER_BYTES).decode()
            return TokenText(Tokenizer.from_str(text))
        except (OSError, FileTooLarge):
            continue
        except Exception:  # noqa: BLE001, S112  tokenizers raises Exception itself for what is no tokenizer
            continue
    return TokenText(None)


def logged_rows(run_dir: Path, groups: Iterable[int]) -> tuple[Samples, int]:
    """Return the logged rows of these groups, and the number of files that were left out.

    A file that is damaged, or larger than any that a run writes, is left out.
    """
    wanted = np.array(sorted(groups), dtype=np.int64)
    rows: Samples = {}
    left, skipped = ROLLOUT_BYTES, 0
    for path in sorted((run_dir / "rollouts").glob("*.parquet")) if len(wanted) else ():
        try:
            with pq.ParquetFile(path) as file:
                left -= _decompressed_bytes(file, path, min(left, ROLLOUT_FILE_BYTES))
                found = list(_selected(file, wanted))
        except (OSError, KeyError, pa.ArrowException, FileTooLarge):
            skipped += 1
            continue
        for row in found:
            by_sample = rows.setdefault((row["prompt_index"], row["attempt"]), {})
            by_sample[row["sample"]] = row
    return rows, skipped


def _decompressed_bytes(file: pq.ParquetFile, path: Path, limit: int) -> int:
    """Return the size by the file's table of contents, before anything is decompressed."""
    parts = range(file.metadata.num_row_groups)
    nbytes = sum(file.metadata.row_group(part).total_byte_size for part in parts)
    if nbytes > limit:
        raise FileTooLarge(str(path), nbytes, limit)
    return nbytes


def _selected(file: pq.ParquetFile, wanted: NDArray[np.int64]) -> Iterator[Row]:
    """Yield the rows of the wanted groups; where there are none, only their numbers are read."""
    groups = file.read(columns=["prompt_index"])["prompt_index"].to_numpy()
    at = np.flatnonzero(np.isin(groups, wanted))
    if len(at):
        yield from file.read(columns=list(_COLUMNS)).take(pa.array(at)).to_pylist()


class ToldSample(msgspec.Struct, frozen=True):
    """One sample of a told group."""

    reward: float | None  # None: masked
    finish: str
    tokens: int
    turns: int
    spans: list[tuple[int, str]]  # weight version, and the text sampled under it
    cut: int  # tokens beyond the last span, that are not shown


def told_samples(
    receipt: Receipt, rows: Mapping[int, Row] | None, text: TokenText
) -> Iterator[ToldSample]:
    """Yield the samples of a group; without text where nothing was logged."""
    for sample in range(min(receipt.samples, _SAMPLES)):
        row = (rows or {}).get(sample)
        ids: list[int] = list(row["response_ids"] or ()) if row else []
        spans, cut = _spans(ids, receipt.version_spans[sample], text)
        reward = receipt.rewards[sample] if receipt.valid[sample] else None
        yield ToldSample(
            reward=reward,
            finish=receipt.finish_reasons[sample],
            tokens=receipt.response_tokens[sample],
            turns=receipt.turns[sample] if receipt.turns else 1,
            spans=spans,
            cut=cut if row else 0,
        )


def prompt_of(rows: Mapping[int, Row] | None, text: TokenText) -> str | None:
    """Return the prompt of a group as text; None where nothing was logged."""
    if not rows:
        return None
    row = next(iter(rows.values()))
    prompt = row["prompt"] or text.of((row["prompt_ids"] or [])[:_TOKENS])
    return prompt[:_SAMPLE_CHARACTERS]


def _spans(
    ids: list[int], versions: Sequence[tuple[int, int]], text: TokenText
) -> tuple[list[tuple[int, str]], int]:
    """Return the text by version, at most ``_SAMPLE_CHARACTERS``, and the tokens left out.

    Observations of several turns have no version of their own: they stand with the tokens before.
    """
    spans = list[tuple[int, str]]()
    at, left = 0, _SAMPLE_CHARACTERS
    for number, (version, count) in enumerate(versions, start=1):
        end = len(ids) if number == len(versions) else at + count
        part = ids[at : min(end, at + _TOKENS)]
        if not part or left <= 0:
            break
        shown = text.of(part)[:left]
        spans.append((version, shown))
        left -= len(shown)
        at = end if left > 0 else at + len(part)
    return spans, max(0, len(ids) - at)
