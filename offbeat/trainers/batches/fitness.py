"""Checks that identify a group of a chunk that cannot be trained, so that it alone is dropped.

Groups were checked where they were made (``schema.check``). The checks here repeat those whose
violation would make a step silently wrong, or fail it for all its groups. They cost microseconds
per group.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import Media, media_of
from offbeat.models.media_rules import MediaRules
from offbeat.trainers.errors import UnfitColumns
from offbeat.transfer_queue.schema import (
    BRANCH_SAMPLES,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_OFFSETS,
    Columns,
)


def check_layout(groups: Sequence[Columns], token_columns: Sequence[str], vocabulary: int) -> None:
    """Check that each group has a prompt, branches of one token or more, and these columns.

    Each column has one value per response token, and every token id is in the vocabulary: for
    another id an embedding on the CPU raises, one on CUDA ends the process, and a sharded one
    yields zeros.

    Raises:
        UnfitColumns: Naming the first group that fails a check.
    """
    for place, group in enumerate(groups):
        for name in (PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, *token_columns):
            if name not in group:
                raise UnfitColumns(place, name, "missing", "in every group")
        offsets, tokens = group[RESPONSE_OFFSETS], len(group[RESPONSE_IDS])
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens:  # noqa: PLR2004 - one branch has two
            want = f"0 to {tokens}, the number of response tokens"
            raise UnfitColumns(place, RESPONSE_OFFSETS, f"{offsets.tolist()[:8]}", want)
        if (np.diff(offsets) < 1).any():
            raise UnfitColumns(place, RESPONSE_OFFSETS, f"{offsets.tolist()[:8]}", "rising")
        if BRANCH_SAMPLES in group:
            _check_samples(place, group[BRANCH_SAMPLES], len(offsets) - 1)
        if not len(group[PROMPT_IDS]):
            raise UnfitColumns(place, PROMPT_IDS, "empty", "one token or more")
        for name in token_columns:
            check_length(place, group, name, tokens)
        for name in (PROMPT_IDS, RESPONSE_IDS):
            _check_ids(place, name, group[name], vocabulary)


def _check_samples(place: int, sample_of_branch: NDArray[np.generic], branches: int) -> None:
    """Check that every branch has a sample, whose branches are adjacent."""
    steps = np.diff(sample_of_branch, prepend=-1)
    if len(steps) != branches or steps[0] != 1 or not np.isin(steps, (0, 1)).all():
        want = f"the sample of each of {branches} branches, 0 first, then the same or the next one"
        raise UnfitColumns(place, BRANCH_SAMPLES, f"{sample_of_branch.tolist()[:8]}", want)


def _check_ids(place: int, name: str, ids: NDArray[np.generic], vocabulary: int) -> None:
    unknown = np.flatnonzero(np.less(ids, 0) | np.greater_equal(ids, vocabulary))
    if len(unknown):
        got = f"{ids[unknown[0]]} at index {unknown[0]}"
        raise UnfitColumns(place, name, got, f"0 to {vocabulary - 1}, the model's vocabulary")


def check_media(place: int, group: Columns, rules: MediaRules) -> Media | None:
    """Return the media of a group's prompt, which the model reads; None if it has none.

    Raises:
        UnfitColumns: They do not fit the model, or the prompt's tokens.
    """
    media = media_of(group)
    if media is None:
        return None
    try:
        problem = rules.problem(group[PROMPT_IDS], media, is_history=False)
    except SchemaError as error:
        raise UnfitColumns(place, error.column, error.got, error.want) from error
    if problem:
        want = f"{rules.noun} and tokens that the model's own processor made"
        raise UnfitColumns(place, next(iter(media)), f"a prompt that {problem}", want)
    return media


def check_placeholders(groups: Sequence[Columns], rules: MediaRules) -> None:
    """Check that no prompt without media has a placeholder token: it would train as text.

    Prompts of an agent's branches may have them: earlier answers, which are sampled, are part of them.

    Raises:
        UnfitColumns: Naming the first group that fails.
    """
    for place, group in enumerate(groups):
        if BRANCH_SAMPLES in group or media_of(group) is not None:
            continue
        at = np.flatnonzero(np.equal(group[PROMPT_IDS], rules.placeholder))
        if len(at):
            got = f"{rules.placeholder}, a placeholder of {rules.noun}, at index {at[0]}"
            want = f"the {rules.noun} of a prompt as columns next to it"
            raise UnfitColumns(place, PROMPT_IDS, got, want)


def check_length(place: int, group: Columns, name: str, tokens: int) -> None:
    """Check that a column, if present, has one value per response token."""
    if len(group[name]) != tokens:
        got = f"{len(group[name])} values"
        raise UnfitColumns(place, name, got, f"{tokens}: one per response token")


def check_finite(
    name: str, values: NDArray[np.generic], wanted: NDArray[np.bool_], ends: NDArray[np.int64]
) -> None:
    """Check that the values of a column are finite at all trained tokens.

    Args:
        name: Name of the column.
        values: [N]: one value per response token of all groups, end to end.
        wanted: [N] bool: the token is trained. Elsewhere a value may be anything.
        ends: [groups] int64: index in ``values`` at which each group ends.
    """
    if values.dtype.kind != "f" or np.isfinite(values[wanted]).all():
        return
    bad = int(np.flatnonzero(wanted & ~np.isfinite(values))[0])
    place = int(np.searchsorted(ends, bad, side="right"))
    raise UnfitColumns(place, name, f"{values[bad]} at a trained token", "finite")
