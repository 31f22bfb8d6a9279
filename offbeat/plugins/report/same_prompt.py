# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyarrow has no types.
"""Finds prompts that were sampled early and late in a run, with both responses and rewards.

The prompts are from the first and the last evaluation. A run without two evaluations has prompts
that were trained in its first and in its last tenth.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from offbeat.messages.groups import group_id
from offbeat.run_files.limits import FileTooLarge, NoRegularFile
from offbeat.runs.logged_samples import (
    SAMPLE_CHARACTERS,
    SAMPLE_TOKENS,
    LoggedGroups,
    Row,
    TokenText,
    read_columns,
    read_logged_rows,
    read_prompt,
    rollout_files,
)
from offbeat.telemetry.evaluation_files import evaluation_files

_UNREADABLE: Final = (OSError, KeyError, pa.ArrowException, FileTooLarge, NoRegularFile)
_ENDS: Final = 4
"""Files of ``rollouts/`` that are read from each end: one per worker in most runs."""
_PART: Final = 10  # early is the first of so many parts of the groups, late the last
_SCORES: Final = ("set", "row", "sample", "reward", "is_valid", "version")
_TEXTS: Final = ("finish_reason", "response_tokens", "response", "prompt")
_GROUPS: Final = ("prompt_index", "environment", "row", "sample", "reward", "status", "branch")
_MOST_ROWS: Final = 50_000  # of the first groups, and of the last ones
_MOST_SAMPLES: Final = 64  # of one prompt in an evaluation
Key = tuple[str, int]
"""Name of a set or an environment, and the row in it."""


class PromptSample(msgspec.Struct, frozen=True, kw_only=True):
    """One response to a prompt."""

    version: int  # weights that sampled it
    reward: float | None  # None: masked
    mean: float | None  # mean reward of the samples of this prompt
    samples: int
    tokens: int
    finish: str
    text: str
    group: str = ""  # name of its group, if it was trained


class SamePrompt(msgspec.Struct, frozen=True):
    """A prompt with an early and a late response."""

    why: Literal["the largest gain", "unchanged", "the largest loss"]
    key: str
    prompt: str
    early: PromptSample
    late: PromptSample


class SamePrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Some prompts with an early and a late response, and how all of them did."""

    source: Literal["evaluation", "training"]
    better: int
    equal: int
    worse: int
    prompts: list[SamePrompt]


def find_same_prompts(run_dir: Path, text: TokenText) -> SamePrompts | None:
    """Return prompts of both ends of a run, or None if it has none, or no readable files."""
    for find in (_evaluated, _trained):
        try:
            found = find(run_dir, text)
        except _UNREADABLE:
            continue
        if found is not None and found.prompts:
            return found
    return None


def _chosen(
    early: Mapping[Key, float], late: Mapping[Key, float]
) -> tuple[dict[str, int], list[tuple[Any, Key]]]:
    """Return how many prompts did better, equally and worse, and which to show and why."""
    gains = {key: late[key] - early[key] for key in sorted(early.keys() & late.keys())}
    better = [key for key, gain in gains.items() if gain > 0]
    equal = [key for key, gain in gains.items() if gain == 0]
    worse = [key for key, gain in gains.items() if gain < 0]
    shown = list[tuple[Any, Key]]()
    if better:
        shown.append(("the largest gain", max(better, key=lambda key: gains[key])))
    if equal:
        shown.append(("unchanged", equal[0]))
    if worse:
        shown.append(("the largest loss", min(worse, key=lambda key: gains[key])))
    return {"better": len(better), "equal": len(equal), "worse": len(worse)}, shown


def _means(rewards: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    by_key = defaultdict[Key, list[float]](list)
    for key, reward in rewards:
        by_key[key].append(reward)
    return {key: sum(values) / len(values) for key, values in by_key.items()}


# --- of evaluations ----------------------------------------------------------------------------


def _evaluated(run_dir: Path, _: TokenText) -> SamePrompts | None:
    files = [path for _, path in evaluation_files(run_dir)]
    if len(files) <= 1:
        return None
    tables = [read_columns(path, (*_SCORES, *_TEXTS)) for path in (files[0], files[-1])]
    scores = [table.select(_SCORES).to_pylist() for table in tables]
    early, late = (
        _means(((row["set"], row["row"]), row["reward"]) for row in rows if row["is_valid"])
        for rows in scores
    )
    counts, shown = _chosen(early, late)
    prompts = list[SamePrompt]()
    for why, key in shown:
        rows = [_rows_of(table, score, key) for table, score in zip(tables, scores, strict=True)]
        prompts.append(
            SamePrompt(
                why,
                f"row {key[1]}" + (f" of {key[0]}" if key[0] else ""),
                _prompt_text(rows[-1][0].get("prompt")),
                _scored(rows[0], early[key]),
                _scored(rows[-1], late[key]),
            )
        )
    return SamePrompts(source="evaluation", **counts, prompts=prompts)


def _rows_of(table: Any, scores: Sequence[Row], key: Key) -> list[Row]:  # noqa: ANN401 -- of pyarrow
    at = [place for place, row in enumerate(scores) if (row["set"], row["row"]) == key]
    return table.take(pa.array(at[:_MOST_SAMPLES])).to_pylist()


def _scored(rows: Sequence[Row], mean: float) -> PromptSample:
    """Return the first sample with a reward, rather than the best one."""
    row = next((each for each in rows if each["is_valid"]), rows[0])
    return PromptSample(
        version=row["version"],
        reward=row["reward"] if row["is_valid"] else None,
        mean=mean,
        samples=len(rows),
        tokens=row["response_tokens"],
        finish=row["finish_reason"],
        text=(row.get("response") or "")[:SAMPLE_CHARACTERS],
    )


def _prompt_text(row: str | None) -> str:
    """Return the text of a row's prompt, or the row as it was logged if it has no plain text."""
    text = row or ""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        decoded = None  # an older file, or a row that was cut
    if isinstance(decoded, dict):
        fields: dict[str, Any] = decoded
        named = next((fields[name] for name in ("prompt", "question") if name in fields), None)
        text = named if isinstance(named, str) else text
    return text[:SAMPLE_CHARACTERS]


# --- of training -------------------------------------------------------------------------------


def _trained(run_dir: Path, text: TokenText) -> SamePrompts | None:
    sides = [_by_key(rows) for rows in _ends_of(rollout_files(run_dir))]
    if not sides:
        return None
    early, late = (
        _means((key, row["reward"]) for key, rows in side.items() for row in rows) for side in sides
    )
    counts, shown = _chosen(early, late)
    texts, _ = read_logged_rows(
        run_dir, {side[key][0]["prompt_index"] for _, key in shown for side in sides}
    )
    attempts = dict(sorted(texts))  # the last attempt of each group
    prompts = list[SamePrompt]()
    for why, key in shown:
        first, last = (side[key] for side in sides)
        if all(rows[0]["prompt_index"] in attempts for rows in (first, last)):
            group = last[0]["prompt_index"]
            prompts.append(
                SamePrompt(
                    why,
                    f"row {key[1]}" + (f" of {key[0]}" if key[0] else ""),
                    read_prompt(texts[group, attempts[group]], text) or "",
                    _sampled(first, texts, attempts, early[key], text),
                    _sampled(last, texts, attempts, late[key], text),
                )
            )
    return SamePrompts(source="training", **counts, prompts=prompts)


def _ends_of(files: Sequence[Path]) -> list[list[Row]]:
    """Return the valid samples of the first and of the last groups, or nothing without any."""
    read = dict.fromkeys((*files[:_ENDS], *files[-_ENDS:]))
    if not read:
        return []
    table = pa.concat_tables([read_columns(path, _GROUPS) for path in read])
    group = table["prompt_index"].to_numpy()
    if not len(group):
        return []
    part = (group.max() + 1 - group.min()) / _PART
    ends = group < group.min() + part, group > group.max() - part
    sampled = [table.filter(pa.array(end)).slice(0, _MOST_ROWS).to_pylist() for end in ends]
    return [
        [row for row in rows if row["status"] == "valid" and not row["branch"]] for rows in sampled
    ]


def _by_key(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """Return the rows of the first group of each prompt."""
    found = dict[Key, list[Row]]()
    for row in sorted(rows, key=lambda row: row["prompt_index"]):
        same = found.setdefault((row.get("environment") or "", row["row"]), [])
        if not same or same[0]["prompt_index"] == row["prompt_index"]:
            same.append(row)
    return found


def _sampled(
    rows: Sequence[Row],
    texts: LoggedGroups,
    attempts: Mapping[int, int],
    mean: float,
    text: TokenText,
) -> PromptSample:
    """Return the first sample with a reward, rather than the best one."""
    group = rows[0]["prompt_index"]
    row = texts[group, attempts[group]][rows[0]["sample"]][0]
    ids = list(row["response_ids"] or ())
    shown = row["response"] or text.of(ids[:SAMPLE_TOKENS])
    return PromptSample(
        version=row["oldest_version"],
        reward=row["reward"],
        mean=mean,
        samples=len(rows),
        tokens=len(ids),
        finish=row["finish_reason"],
        text=shown[:SAMPLE_CHARACTERS],
        group=group_id(group),
    )
