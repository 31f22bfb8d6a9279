"""Content of the page: a tree of plain values and columns, for one run or several.

With the option ``images``, example groups have small copies of pictures.

Also the text of the example groups: prompt, and responses by weight version.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from offbeat.messages.groups import Receipt, group_id
from offbeat.plugins.images.thumbnails import LONGEST_SIDE, THUMBNAILS
from offbeat.plugins.report.group_rows import MAX_ROWS
from offbeat.plugins.report.page import page
from offbeat.plugins.report.story import RunStory
from offbeat.plugins.report.timeline import as_bytes
from offbeat.plugins.report.verdicts import NOTHING, count_signals, verdict_of
from offbeat.runs.applied_steps import AXES, bin_means, last_of_bins
from offbeat.runs.logged_samples import (
    SAMPLE_CHARACTERS,
    SAMPLE_TOKENS,
    BranchesBySample,
    TokenText,
    read_prompt,
)
from offbeat.runs.page_files import check_no_links
from offbeat.runs.past_run import clock_time
from offbeat.telemetry.metric_table import ROWS
from offbeat.telemetry.summary import Summary, duration, write_atomically

_SAMPLES: Final = 64  # samples per group


class ExampleSample(msgspec.Struct, frozen=True):
    """A sample of an example group."""

    reward: float | None  # None: masked
    finish: str
    tokens: int
    turns: int
    branches: int
    spans: list[tuple[int, str]]  # weight version, and the text sampled with it
    is_cut: bool  # its text continues after the last span


def example_samples(
    receipt: Receipt, rows: BranchesBySample | None, text: TokenText
) -> Iterator[ExampleSample]:
    """Yield the samples of a group, without text if none was logged."""
    for sample in range(min(receipt.samples, _SAMPLES)):
        branches: list[list[int]] = [
            list(row["response_ids"] or ()) for row in (rows or {}).get(sample, ())
        ]
        spans, is_cut = _spans(branches, receipt.version_spans[sample], text)
        reward = receipt.rewards[sample] if receipt.valid[sample] else None
        yield ExampleSample(
            reward=reward,
            finish=receipt.finish_reasons[sample],
            tokens=receipt.response_tokens[sample],
            turns=receipt.turns[sample] if receipt.turns else 1,
            branches=receipt.branches[sample] if receipt.branches else 1,
            spans=spans,
            is_cut=is_cut,
        )


def rest_of(rows: BranchesBySample | None) -> str | None:
    """Return the logged fields of a prompt's row other than its text, such as the answer."""
    if not rows:
        return None
    rest = next(iter(rows.values()))[0].get("prompt_row")  # an older log lacks this column
    return None if rest is None else str(rest)[:SAMPLE_CHARACTERS]


def pictures_of(rows: BranchesBySample | None) -> list[dict[str, Any]]:
    """Return the logged pictures of a group, for a page that draws them pixel by pixel.

    A picture is left out if its bytes do not fit its sides, or its sides exceed the logged maximum.
    """
    if not rows:
        return []
    logged = next(iter(rows.values()))[0].get("pictures")  # an older log lacks this column
    pictures = cast("list[dict[str, Any]]", logged) if isinstance(logged, list) else []
    return [
        each | {"rgb": base64.b64encode(each["rgb"]).decode()}
        for each in pictures[:THUMBNAILS]
        if _is_picture(each)
    ]


def _is_picture(logged: object) -> bool:
    """Return whether a run may have logged this: short sides, and bytes that fit them."""
    match logged:
        case {"height": int(height), "width": int(width), "rgb": bytes(rgb)}:
            shorter, longer = sorted((height, width))
            return 0 < shorter <= longer <= LONGEST_SIDE and len(rgb) == 3 * height * width
        case _:
            return False


def _spans(
    branches: Sequence[list[int]], versions: Sequence[tuple[int, int]], text: TokenText
) -> tuple[list[tuple[int, str]], bool]:
    """Return the text by version, and whether it was cut at ``SAMPLE_CHARACTERS``.

    The versions of a sample are the versions of its branches, one after another. Each branch begins
    on a new line.
    """
    spans, left = list[tuple[int, str]](), SAMPLE_CHARACTERS
    for begins, version, part in _pieces(branches, versions):
        shown = ("\n" if begins else "") + text.of(part[:SAMPLE_TOKENS])
        spans.append((version, shown[:left]))
        left -= len(shown)
        if left < 0:
            return spans, True
    return spans, False


def _pieces(
    branches: Sequence[list[int]], versions: Sequence[tuple[int, int]]
) -> Iterator[tuple[bool, int, list[int]]]:
    """Yield tokens of one branch and version, and whether they begin a branch after the first."""
    rest = [[version, count] for version, count in versions]
    for number, ids in enumerate(branches):
        at = 0
        while at < len(ids) and rest:
            version, count = rest[0]
            # A file of another version of offbeat may count otherwise: keep all its tokens.
            taken = len(ids) - at if len(rest) == 1 else min(count, len(ids) - at)
            yield number > 0 and not at, version, ids[at : at + taken]
            at += taken
            rest[0][1] -= taken
            if rest[0][1] <= 0 and len(rest) > 1:
                rest.pop(0)


Facts = dict[str, Any]
EXAMPLE_GROUPS: Final = 160
PAGE_BYTES: Final = 5_000_000
"""Size beyond which a page is created again with less content."""
_THINNINGS: Final = (1, 2, 4, 8, 16)
_BINS: Final = 1000  # bins of the curves in the panels
_COARSE_BINS: Final = 250  # bins of all other metrics
_HEAT_BINS: Final = 200
_TEXT_CHARACTERS: Final = 500_000  # of all examples together; compression leaves about a fifth
_CURVES: Final = (
    "train/reward", "train/loss", "train/entropy", "train/kl_reference", "train/kl_reward",
    "train/teacher_kl", "off_policy/behaviour_kl", "train/zero_variance_groups", "rollout/response_tokens_mean",
    "rollout/truncated_fraction", "rollout/masked_fraction", "rollout/refused_fraction",
    "off_policy/staleness_mean", "off_policy/staleness_max", "off_policy/logprob_gap_mean",
    "off_policy/logprob_gap_max", "train/grad_norm", "train/clip_fraction_low",
    "train/clip_fraction_high", "throughput/samples_per_s", "throughput/tokens_per_s",
    "sync/pause_s", "sync/transfer_s", "sync/bytes", "time/step_s",
)  # fmt: skip
_LONGEST_VALUE: Final = 300  # characters of a config value


def stories(run_dirs: Sequence[Path]) -> list[RunStory]:
    """Read the runs of a page: the first completely, the others only for the comparison.

    Raises the errors of ``RunStory``, and ``LinkRefused``.
    """
    for run_dir in run_dirs:
        check_no_links(run_dir)
    examples = EXAMPLE_GROUPS
    return [RunStory(run_dir, 0 if number else examples) for number, run_dir in enumerate(run_dirs)]


def document(run_dirs: Sequence[Path]) -> Facts:
    """Return the tree of the page, in full. Raises the errors of ``RunStory``."""
    return document_of(stories(run_dirs))


def fitting(runs: Sequence[RunStory], make: Callable[[Facts], str]) -> str:
    """Return ``make(tree)``, with as much content in the tree as fits in ``PAGE_BYTES``."""
    text = ""
    for thinning in _THINNINGS:
        text = make(document_of(runs, thinning))
        if len(text) <= PAGE_BYTES:
            break
    return text


def document_of(runs: Sequence[RunStory], thinning: int = 1) -> Facts:
    """Return the tree of the page. ``thinning`` reduces content that grows with the run."""
    names = {name for story in runs for name in (*story.columns, *story.evaluations)}
    return {
        "made": clock_time(datetime.now(UTC).timestamp()),
        "runs": [
            run_facts(story, full=not number, thinning=thinning)
            for number, story in enumerate(runs)
        ],
        "meaning": {
            name: [unit, says, rises] for name, unit, _, says, rises in ROWS if name in names
        },
    }


def run_facts(story: RunStory, *, full: bool, thinning: int = 1) -> Facts:
    """Return the facts of one run. Without ``full``, only facts that a comparison needs.

    ``thinning`` divides the number of rows, characters and points that grow with the run.
    """
    facts: Facts = {
        "name": story.name,
        "run_id": story.ledger.run_id,
        "directory": story.run_dir.name,
        "began": clock_time(story.began_unix_s),
        "bound": story.bound,
        "problems": story.problems,
        "thinned": [],
        "config": {key: _short(value) for key, value in sorted(story.config.items())},
        "summary": [
            ("outcome", story.state),
            *_reason(story.summary),
            *_summary_rows(story.summary),
        ],
        **_curves(story, full=full, thinning=thinning),
    }
    timeline = story.timeline
    status = None if story.status is None else story.status.status
    verdict = verdict_of(
        story.state,
        story.summary,
        story.bound,
        timeline.all_incidents(),
        () if status is None else status.waits,
        timeline.counts,
        story.config,
    )
    facts["verdict"] = msgspec.to_builtins(verdict)
    if full:
        facts["now"] = None if status is None else msgspec.to_builtins(status)
        facts["same"] = msgspec.to_builtins(story.same_prompts)
        facts["failures"] = story.failed_samples
        facts |= timeline.to_facts()
        facts["heat"] = [as_bytes(row) for row in story.steps.staleness_shares(_HEAT_BINS)]
        facts["groups"] = story.groups.to_facts(MAX_ROWS // thinning)
        facts["examples"] = dict(_examples(story, _TEXT_CHARACTERS // thinning))
        facts["thinned"] = list(_thinned(story, facts, thinning))
    return facts


def _thinned(story: RunStory, facts: Facts, thinning: int) -> Iterator[str]:
    """Yield a sentence on each kind of content of which the page shows only a part."""
    drawn, listed = story.ledger.totals.drawn, facts["groups"]["count"]
    if listed < drawn:
        yield (
            f"Of {drawn:,} groups, the table lists {listed:,}: the last ones, and some from earlier "
            "parts of the run. offbeat why RUN GROUP shows any of them."
        )
    if facts["steps_per_point"] > 1:
        yield f"A point of a curve is the mean of {facts['steps_per_point']:,.1f} steps."
    if thinning > 1:
        yield (
            f"So that the page has at most {PAGE_BYTES / 1e6:.0f} MB, it has one of {thinning} of the "
            f"points and texts that it would have: the text of {len(facts['examples'])} groups, and "
            f"{_COARSE_BINS // thinning} points of each metric that is in no panel."
        )


def _curves(story: RunStory, *, full: bool, thinning: int) -> Facts:
    bins, coarse_bins = max(10, _BINS // thinning), max(10, _COARSE_BINS // thinning)
    columns = story.columns
    fine = [name for name in columns if name in _CURVES or name.startswith("staleness/ratio_p")]
    coarse = sorted(set(columns) - set(fine) - set(AXES)) if full else []
    scores = story.evaluations
    return {
        "x": {axis: last_of_bins(columns[axis], bins) for axis in AXES},
        "curves": {name: bin_means(columns[name], bins) for name in fine},
        "coarse_x": {axis: last_of_bins(columns[axis], coarse_bins) for axis in AXES},
        "coarse": {name: bin_means(columns[name], coarse_bins) for name in coarse},
        "scores_x": {axis: last_of_bins(scores[axis], bins) for axis in AXES},
        "scores": {name: bin_means(scores[name], bins) for name in scores if name not in AXES},
        "steps_per_point": max(1.0, len(columns["step"]) / bins),
    }


def _reason(summary: Summary) -> Iterator[tuple[str, str]]:
    reason = summary.error or (summary.ended_by and f"ended by {summary.ended_by}")
    if reason:
        yield "reason", _short(reason)


def _summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows that a comparison of runs shows side by side."""
    yield "steps", f"{summary.steps:,}"
    yield "steps with signal", count_signals(summary) or NOTHING
    if summary.signal_warning:
        yield "warning", summary.signal_warning
    yield "reward, first steps", _figure(summary.reward_first)
    yield "reward, last steps", _figure(summary.reward_last)
    yield "duration", duration(summary.wall_s)
    yield "samples/s", f"{summary.samples_per_s:,.0f}"
    yield "tokens/s", f"{summary.tokens_per_s:,.0f}"
    yield "bottleneck", summary.verdict or NOTHING
    yield "trainer busy", f"{summary.trainer_busy_fraction:.0%}"
    yield "engines busy", f"{summary.generator_busy_fraction:.0%}"
    yield "staleness, most", f"{summary.max_staleness_trained}"
    yield "groups trained", f"{summary.groups.trained:,}"
    yield "groups dropped", f"{sum(summary.groups.dropped.values()):,}"
    yield "restarts of engines", f"{summary.restarts}"
    yield "rewinds", f"{summary.rewinds}"
    yield from ((name, _figure(value)) for name, value in sorted(summary.evaluation.items()))


def _examples(story: RunStory, characters: int) -> Iterator[tuple[str, Facts]]:
    """Yield example groups until ``characters`` are used up."""
    left = characters
    for prompt_index in story.examples:
        receipt = story.receipts.get(prompt_index)
        rows = story.rows.get((prompt_index, receipt.attempt)) if receipt else None
        samples = list(example_samples(receipt, rows, story.text)) if receipt else []
        history = story.histories[prompt_index]
        facts: Facts = {
            "name": group_id(prompt_index),
            "now": history.now,
            "prompt": read_prompt(rows, story.text),
            "row": rest_of(rows),
            "pictures": pictures_of(rows),
            "samples": msgspec.to_builtins(samples),
            "moments": [
                [each.unix_s - story.began_unix_s if each.unix_s else None, each.what, each.detail]
                for each in history.moments
            ],
        }
        left -= sum(len(text) for sample in samples for _, text in sample.spans)
        left -= len(facts["prompt"] or "") + len(facts["row"] or "")
        left -= sum(len(each["rgb"]) for each in facts["pictures"])
        left -= sum(len(each.detail) for each in history.moments)
        if left < 0:
            return
        yield str(prompt_index), facts


def _short(value: object) -> str:
    text = NOTHING if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"


def _figure(value: float | None) -> str:
    return NOTHING if value is None or not np.isfinite(value) else f"{value:.4g}"


DEFAULT_NAME: Final = "report.html"


class WrittenReport(NamedTuple):
    """Path and size of a written page."""

    path: Path
    nbytes: int


def write_report(run_dirs: Sequence[Path], output: Path | None) -> WrittenReport:
    """Write the page to ``output``; default: into the first run's directory.

    Raises:
        NotARun: A directory has no journal.
        JournalCorrupt: A file of a journal is damaged.
        JournalVersion: A different version of offbeat wrote it.
        LinkRefused: A file of a run is a symbolic link.
        ImpossibleEvent: An event of a journal does not fit the events before it.
        OSError: The file cannot be written.
    """
    content = fitting(stories(run_dirs), page).encode()
    path = output or run_dirs[0] / DEFAULT_NAME
    write_atomically(path, content)
    return WrittenReport(path, len(content))
