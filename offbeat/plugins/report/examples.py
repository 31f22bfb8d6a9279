"""Text of the example groups of the page: prompt, and responses by weight version.

Depends on the option ``images``: the page shows small copies.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import msgspec

from offbeat.messages.groups import Receipt
from offbeat.plugins.images.thumbnails import LONGEST_SIDE, THUMBNAILS
from offbeat.runs.logged_samples import (
    SAMPLE_CHARACTERS,
    SAMPLE_TOKENS,
    BranchesBySample,
    TokenText,
)

_SAMPLES: Final = 64  # of a group


class ExampleSample(msgspec.Struct, frozen=True):
    """A sample of an example group."""

    reward: float | None  # None: masked
    finish: str
    tokens: int
    turns: int
    branches: int
    spans: list[tuple[int, str]]  # weight version, and the text sampled under it
    is_cut: bool  # its text goes on after the last span


def example_samples(
    receipt: Receipt, rows: BranchesBySample | None, text: TokenText
) -> Iterator[ExampleSample]:
    """Yield the samples of a group; without text where nothing was logged."""
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
    """Return what the prompt's row has besides its text, as it was logged: such as the answer."""
    if not rows:
        return None
    rest = next(iter(rows.values()))[0].get("prompt_row")  # an older log has no such column
    return None if rest is None else str(rest)[:SAMPLE_CHARACTERS]


def pictures_of(rows: BranchesBySample | None) -> list[dict[str, Any]]:
    """Return the logged pictures of a group, for a page that draws them pixel by pixel.

    One whose bytes are not those of its sides, or with sides longer than a run logs, is left out.
    """
    if not rows:
        return []
    logged = next(iter(rows.values()))[0].get("pictures")  # an older log has no such column
    pictures = cast("list[dict[str, Any]]", logged) if isinstance(logged, list) else []
    return [
        each | {"rgb": base64.b64encode(each["rgb"]).decode()}
        for each in pictures[:THUMBNAILS]
        if _is_picture(each)
    ]


def _is_picture(logged: object) -> bool:
    """Return whether a run may have logged this: bytes of its sides, which are short."""
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

    The versions of a sample are those of its branches, one behind the other; each branch begins on
    a line of its own.
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
            # A file of another version of offbeat may count otherwise: nothing of it is lost.
            taken = len(ids) - at if len(rest) == 1 else min(count, len(ids) - at)
            yield number > 0 and not at, version, ids[at : at + taken]
            at += taken
            rest[0][1] -= taken
            if rest[0][1] <= 0 and len(rest) > 1:
                rest.pop(0)
