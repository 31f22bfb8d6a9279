"""``offbeat why RUN --eval SET ROW``: shows one row of a set."""
# pyright: basic
# pyarrow has no types.

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from offbeat.environments.media_prompts import find_media
from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import SAMPLE_CHARACTERS, printable, wrap_line
from offbeat.runs.past_run import find_journal
from offbeat.telemetry.evaluation_files import (
    FOLDER,
    evaluation_files,
    read_evaluated_row,
    rows_by_set,
)

UNNAMED: Final = "-"
"""Name shown for the set of ``eval.path``, which has none."""

_SHOWN: Final = 12  # existing names or numbers in a message
_RESPONSE_CHARACTERS: Final = 2 * SAMPLE_CHARACTERS  # all that a file keeps


class NoSuchEvaluation(OffbeatError):
    """The run has no such evaluation, or no evaluation with such a row.

    Fix: use one of the named sets, rows and versions.
    """

    run: str
    wanted: str  # such as "set 'maths'"
    there: str  # existing alternatives in words; empty if none

    def __str__(self) -> str:
        if not self.there:
            return (
                f"{self.run} has no evaluation on disk: set eval.interval or eval.at_start, or wait "
                "until the first is done"
            )
        return f"{self.run} has no {self.wanted} in its evaluations; there are {self.there}"


class EvaluationUnreadable(OffbeatError):
    """The file of an evaluation is damaged.

    Fix: restore or remove the file.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} is not a readable evaluation: {self.problem}. Restore it, or move it away"
        )


class EvaluatedRow(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one row of a set, evaluation by evaluation."""

    run: str
    set: str  # empty for the set without a name
    row: int
    evaluations: list[EvaluatedVersion]  # the row's samples, oldest evaluation first
    shown: int  # due version of the evaluation with individually shown samples

    def to_json(self) -> str:
        """Encode as indented JSON with a final newline. Media are reduced to their sizes."""
        values = msgspec.structs.asdict(self) | {
            "evaluations": [
                msgspec.structs.asdict(each)
                | {"samples": [_fields(sample) for sample in each.samples]}
                for each in self.evaluations
            ]
        }
        return msgspec.json.format(msgspec.json.encode(values), indent=2).decode() + "\n"

    def to_text(self) -> str:
        """Format in 80 columns, with a final newline. Make text of models and files printable."""
        (chosen,) = (each for each in self.evaluations if each.due == self.shown)
        prompt = chosen.samples[0].prompt
        lines = [
            *wrap_line(
                f"row {self.row} of set {self.set or UNNAMED} of {Path(self.run).name}", "", "  "
            ),
            *wrap_line(
                "not in this file" if prompt is None else _text(prompt), "prompt  ", " " * 8
            ),
            *(line for each in _previews(chosen) for line in wrap_line(each, "", " " * 8)),
            "",
            f"{'due':>8}  {'version':>8}  {'reward':>8}  {'correct':>8}  {'turns':>6}",
            *(_summary(each) for each in self.evaluations),
            "",
            f"samples of the evaluation due at version {chosen.due}",
            *(line for sample in chosen.samples for line in _sample(sample)),
        ]
        return "\n".join(map(str.rstrip, lines)) + "\n"


def load_evaluated_row(run_dir: Path, name: str, row: str, due: int | None = None) -> EvaluatedRow:
    """Return the samples that the evaluations of a run made for a row of a set.

    Args:
        run_dir: Directory of the run.
        name: Name of the set, or ``UNNAMED`` for the set of ``eval.path``.
        row: Number of the row in the file of the set.
        due: Due version of the evaluation to show, or None for the newest evaluation that has
            sampled the row.

    Raises:
        NoSuchEvaluation: The run has no such set, row or evaluation.
        EvaluationUnreadable: A file is damaged.
        NotARun: The journal is missing.
    """
    import pyarrow as pa  # noqa: PLC0415 -- other commands read no evaluation

    find_journal(run_dir)
    files = evaluation_files(run_dir)
    plain = "" if name == UNNAMED else name
    number = int(row) if row.isdecimal() and row.isascii() and len(row) < 19 else -1  # noqa: PLR2004 - digits of int64
    found, path = list[EvaluatedVersion](), run_dir
    try:
        for _, path in files:
            evaluated = read_evaluated_row(path, plain, number)
            if evaluated is not None:
                found.append(evaluated)
        if not found:
            rows = rows_by_set(path := files[-1][1]) if files else {}
            raise NoSuchEvaluation(str(run_dir), *_missing(rows, plain, row))
    except pa.ArrowException as damaged:
        raise EvaluationUnreadable(str(path), printable(str(damaged))) from damaged
    dues = [each.due for each in found]
    if due is not None and due not in dues:
        there = f"evaluations with the row at {_numbers(dues)}"
        raise NoSuchEvaluation(str(run_dir), f"evaluation due at version {due}", there)
    return EvaluatedRow(
        run=str(run_dir),
        set=plain,
        row=number,
        evaluations=found,
        shown=dues[-1] if due is None else due,
    )


def _missing(rows: dict[str, list[int]], name: str, row: str) -> tuple[str, str]:
    """Return what was not found, and the alternatives that exist."""
    if name not in rows:
        there = ", ".join(printable(each) or UNNAMED for each in sorted(rows))
        return f"set {printable(name) or UNNAMED!r}", f"the sets {there}" if rows else ""
    return f"row {row!r:.40} of set {printable(name) or UNNAMED}", f"rows {_numbers(rows[name])}"


def _numbers(ascending: Sequence[int]) -> str:
    if len(ascending) > 1 and list(ascending) == list(range(ascending[0], ascending[-1] + 1)):
        return f"{ascending[0]} to {ascending[-1]}"
    more = len(ascending) - _SHOWN
    listed = ", ".join(map(str, ascending[:_SHOWN]))
    return f"{listed} and {more} more, up to {ascending[-1]}" if more > 0 else listed


def _fields(sample: ScoredSample) -> Mapping[str, object]:
    fields = msgspec.structs.asdict(sample)
    copies = fields.pop("previews")
    return fields | {
        find_media().PREVIEW_COLUMN: [
            {"height": each.height, "width": each.width} for each in copies
        ]
    }


def _previews(evaluated: EvaluatedVersion) -> Iterator[str]:
    """Yield the paths of the small copies of the prompt's media, if it has any."""
    copies = [each for sample in evaluated.samples for each in sample.previews]
    if copies:
        sides = ", ".join(dict.fromkeys(f"{each.width} x {each.height}" for each in copies))
        file = f"{FOLDER}/{evaluated.due:06d}.parquet"
        name = find_media().PREVIEW_COLUMN
        yield f"{name}  small copies of {len(copies)} in {file}, column {name}: {sides} pixels"


def _summary(evaluated: EvaluatedVersion) -> str:
    valid = [sample for sample in evaluated.samples if sample.is_valid]
    reward = sum(sample.reward for sample in valid) / len(valid) if valid else None
    correct = f"{sum(sample.is_correct for sample in valid)}/{len(valid)}"
    turns = sum(sample.turns for sample in evaluated.samples) / len(evaluated.samples)
    mean = "-" if reward is None else f"{reward:.3f}"
    return f"{evaluated.due:>8}  {evaluated.version:>8}  {mean:>8}  {correct:>8}  {turns:>6.1f}"


def _sample(sample: ScoredSample) -> Iterator[str]:
    reward = f"{sample.reward:.3f}" if sample.is_valid else "masked"
    verdict = "correct" if sample.is_correct else "wrong" if sample.is_valid else ""
    answer = "" if sample.answer is None else f"  answer {_text(sample.answer) or 'none'}"
    branches = f", {sample.branches} branches" if sample.branches > 1 else ""
    yield from wrap_line(
        f"{reward:>8}  {verdict:<7}  {sample.finish_reason}, "
        f"{_count(sample.response_tokens, 'token')}, {_count(sample.turns, 'turn')}{branches}"
        f"{answer}",
        f"{sample.sample:>4}  ",
        " " * 6,
    )
    if sample.response is not None:
        yield from wrap_line(_text(sample.response), " " * 6, " " * 6)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _text(text: str) -> str:
    return printable(text, longest=_RESPONSE_CHARACTERS)
