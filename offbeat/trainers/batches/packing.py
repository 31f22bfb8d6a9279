"""Packing of prompt groups into padded rows of tokens. Numpy only.

With a shared prompt, a row contains the prompt once, followed by the responses of several branches.
Each response attends to the prompt and itself. Otherwise a row is the prompt and one response. The
last token of a response predicts nothing and is left out. So are tokens after the response's last
wanted token. The rows of a microbatch are stacked and padded to the longest, or laid end to end in
one *flat* row, with attention computed segment by segment. Packing may put the branches of a sample
into different rows, because a loss needs only each branch's share of its sample.

Legend: R rows, T tokens of the longest row, S branches (a sample has one or more), N wanted
response tokens (whose logprobs are computed), U positions in the rows that predict one or more of
them.

A flat row is divided into parts. Each part attends causally to the keys listed for it. Parts
replace an attention mask, which would have one entry per pair of tokens. The trainers derive parts
from the prompt groups of a flat row, or from the segments of padded rows.

The checks find a group that cannot be trained, so that only this group is dropped. Groups were
checked when they were made (``schema.check``). Some checks are repeated here, because a violation
would make a step silently wrong, or make it fail for all its groups. They cost microseconds per
group.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import Media, get_media
from offbeat.models.media_canaries import canary_media
from offbeat.models.media_placing import PlacedMedia, RowSpan, place_media, place_media_by_row
from offbeat.models.media_rules import TEXT_ONLY, MediaRules
from offbeat.trainers.errors import UnfitColumns
from offbeat.transfer_queue.schema import (
    BRANCH_SAMPLES,
    LOSS_MASK,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_OFFSETS,
    Columns,
)


def check_layout(groups: Sequence[Columns], token_columns: Sequence[str], vocabulary: int) -> None:
    """Check that each group has a prompt, branches of one token or more, and these columns.

    Each column has one value per response token, and every token id is in the vocabulary. For an id
    outside the vocabulary, an embedding on the CPU raises, an embedding on CUDA ends the process,
    and a sharded embedding yields zeros.

    Raises:
        UnfitColumns: Names the first group that fails a check.
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
    """Check that every branch belongs to a sample, and that a sample's branches are adjacent."""
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
    """Return the media of a group's prompt for the model, or None if it has none.

    Raises:
        UnfitColumns: The media do not fit the model, or the prompt's tokens.
    """
    media = get_media(group)
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
    """Check that prompts without media have no placeholder tokens, which would train as text.

    Prompts of an agent's branches may have placeholder tokens, because they contain earlier sampled
    answers.

    Raises:
        UnfitColumns: Names the first group that fails.
    """
    for place, group in enumerate(groups):
        if BRANCH_SAMPLES in group or get_media(group) is not None:
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
        values: [N]: one value per response token, concatenated over all groups.
        wanted: [N] bool: whether the token is trained. At other tokens any value is allowed.
        ends: [groups] int64: index in ``values`` at which each group ends.
    """
    if values.dtype.kind != "f" or np.isfinite(values[wanted]).all():
        return
    bad = int(np.flatnonzero(wanted & ~np.isfinite(values))[0])
    place = int(np.searchsorted(ends, bad, side="right"))
    raise UnfitColumns(place, name, f"{values[bad]} at a trained token", "finite")


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PROMPT: Final = 0  # segment that every token of a row attends to
PADDING: Final = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """Concatenated groups. Every array is indexed by branch, or by token over all responses."""

    prompts: tuple[Ints, ...]  # one per group
    group_S: Ints
    start_S: Ints  # first token of each branch's response
    length_S: Ints  # up to and including its last wanted token, or 0 without one
    sample_S: Ints  # index of each branch's sample, counted over all groups
    tokens: Ints  # all response tokens
    wanted: Bools  # per token: its logprob is computed
    branch: Ints  # per token: index of its branch
    ends: Ints  # per group: index at which its response tokens end
    sample_tokens_S: Ints  # wanted tokens of each branch's sample, in all its branches
    media: tuple[Media | None, ...] = ()  # of each group's prompt
    media_rules: MediaRules = TEXT_ONLY

    @property
    def wanted_samples(self) -> Ints:
        """Return the indices of the samples with a wanted token."""
        return np.unique(self.sample_S[self.length_S > 0])


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Branches of one group that share one copy of its prompt."""

    group: int
    branches: tuple[int, ...]
    length: int  # tokens that a forward pass computes


@dataclass(frozen=True, slots=True)
class PromptTree:
    """A prompt and the branches that follow it, as tokens of a flat row."""

    prompt: slice
    branches: tuple[slice, ...]  # branches with a token in the row, end to end behind the prompt

    @property
    def whole(self) -> slice:
        """Return the tokens of prompt and branches."""
        last = self.branches[-1] if self.branches else self.prompt
        return slice(self.prompt.start, last.stop)

    @property
    def is_one_sequence(self) -> bool:
        """Return whether every token attends to all earlier tokens."""
        return len(self.branches) <= 1


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of one microbatch, and the positions that predict its wanted tokens."""

    input_ids_RT: Ints
    positions_RT: Ints
    segments_RT: Ints  # PROMPT, 1.. for the branches of the row, PADDING
    sample_tokens_RT: Ints  # for a response token: wanted tokens of its sample; else 0
    predicts_U: Ints  # indices into the flattened rows
    which_N: Ints  # index into U of the position that predicts each wanted token
    target_N: Ints  # token ids
    source_N: Ints  # indices into ``Batch.tokens``
    one_branch_a_row: bool  # causal attention needs no mask
    trees: tuple[PromptTree, ...] = ()  # groups of a flat row; empty: a row holds one group
    media: PlacedMedia | None = None  # of the prompts in the rows, once per prompt
    is_padding: bool = False  # belongs to no sample, so its results do not count

    @property
    def padding_token(self) -> int:
        """Return a token to pad with: one that the model computes in these rows anyway.

        At a different token, such as one with an embedding of zeros, the model may have no finite
        gradient. Then infinity times 0 would put NaN into the gradients of the weights.
        """
        first = self.predicts_U[0] if self.predicts_U.size else 0
        return int(self.input_ids_RT.flat[first])


def padding_microbatch(token: int) -> PackedRows:
    """Return a microbatch of one token and no sample, for a rank that must join others in a pass.

    Args:
        token: The ``padding_token`` of a microbatch of the same step.
    """
    return replace(
        pack_rows([[token]]),
        which_N=np.zeros(1, np.int64),
        target_N=np.full(1, token, np.int64),
        source_N=np.zeros(1, np.int64),
        is_padding=True,
    )


def pack_rows(prompts: Sequence[Sequence[int]]) -> PackedRows:
    """Return prompts of equal length as one row each. The last position of each predicts."""
    input_ids_RT = np.asarray(prompts, np.int64)
    shape: tuple[int, int] = input_ids_RT.shape
    rows, tokens = shape
    nothing_N = np.zeros(0, np.int64)
    return PackedRows(
        input_ids_RT=input_ids_RT,
        positions_RT=np.tile(np.arange(tokens), (rows, 1)),
        segments_RT=np.full(shape, PROMPT, np.int64),
        sample_tokens_RT=np.zeros(shape, np.int64),
        predicts_U=np.arange(1, rows + 1) * tokens - 1,
        which_N=nothing_N,
        target_N=nothing_N,
        source_N=nothing_N,
        one_branch_a_row=True,
    )


def canary_rows(prompts: Sequence[Sequence[int]], rules: MediaRules) -> PackedRows:
    """Return canary prompts as one row each. Prompts with placeholders get the canaries' medium."""
    rows = pack_rows(prompts)
    media = canary_media(rules, prompts)
    return replace(rows, media=place_media_by_row(rules, prompts, media, rows.positions_RT))


def flatten(
    groups: Sequence[Columns],
    *,
    only_trained: bool,
    vocabulary: int,
    media_rules: MediaRules = TEXT_ONLY,
) -> Batch:
    """Concatenate groups. Wanted tokens are the ones under the loss mask, or all of them.

    Raises:
        UnfitColumns: A group's columns do not fit each other, the model's vocabulary, or its media.
    """
    check_layout(groups, (LOSS_MASK,) if only_trained else (), vocabulary)
    if only_trained:
        check_placeholders(groups, media_rules)
    media = tuple(check_media(place, group, media_rules) for place, group in enumerate(groups))
    offsets = [np.asarray(group[RESPONSE_OFFSETS], np.int64) for group in groups]
    firsts = np.cumsum([0] + [int(each[-1]) for each in offsets])
    start_S = np.concatenate(
        [each[:-1] + first for each, first in zip(offsets, firsts, strict=False)]
    )
    full_S = np.concatenate([np.diff(each) for each in offsets])
    tokens = np.concatenate([group[RESPONSE_IDS] for group in groups]).astype(np.int64)
    if only_trained:
        wanted = np.concatenate([group[LOSS_MASK] for group in groups]).astype(np.bool_)
        ends = np.where(wanted, np.arange(1, len(tokens) + 1), 0)
        length_S = np.maximum(np.maximum.reduceat(ends, start_S) - start_S, 0)
    else:
        wanted, length_S = np.ones(len(tokens), np.bool_), full_S
    sample_S = _sample_of_each_branch(groups, offsets)
    branch = np.repeat(np.arange(len(full_S)), full_S)
    return Batch(
        prompts=tuple(np.asarray(group[PROMPT_IDS], np.int64) for group in groups),
        group_S=np.repeat(np.arange(len(groups)), [len(each) - 1 for each in offsets]),
        start_S=start_S,
        length_S=length_S,
        sample_S=sample_S,
        tokens=tokens,
        wanted=wanted,
        branch=branch,
        ends=firsts[1:],
        sample_tokens_S=np.bincount(sample_S[branch[wanted]], minlength=sample_S[-1] + 1)[sample_S],
        media=media,
        media_rules=media_rules,
    )


def pack(batch: Batch, rows: Sequence[PackedRow], *, flat: bool = False) -> PackedRows:
    """Lay out one microbatch. Every branch in ``rows`` must have at least one wanted token.

    Rows are padded to the longest one, or laid end to end in a single row with ``flat``.
    """
    prompts = [batch.prompts[row.group] for row in rows]
    prompt_R = np.array([len(prompt) for prompt in prompts])
    branches_R = np.array([len(row.branches) for row in rows])
    branch_S = np.concatenate([np.asarray(row.branches, np.int64) for row in rows])
    row_S = np.repeat(np.arange(len(rows)), branches_R)
    length_S, start_S = batch.length_S[branch_S], batch.start_S[branch_S]
    column_S = prompt_R[row_S] + _before_in_row(length_S - 1, row_S, branches_R)
    segment_S = 1 + _before_in_row(np.ones_like(length_S), row_S, branches_R)
    length_R = np.array([row.length for row in rows])
    width = int(length_R.max())
    shape = (1, int(length_R.sum())) if flat else (len(rows), width)
    first_R = np.cumsum(length_R) - length_R if flat else np.arange(len(rows)) * width

    input_ids_RT = np.empty(shape, np.int64)
    # Pad with a token of the row, for the reason in ``PackedRows.padding_token``.
    input_ids_RT[:] = 0 if flat else np.array([prompt[0] for prompt in prompts])[:, None]
    positions_RT = np.zeros(shape, np.int64)
    segments_RT = np.full(shape, PADDING, np.int64)
    sample_tokens_RT = np.zeros(shape, np.int64)
    if not flat:
        positions_RT[:] = np.minimum(np.arange(width), prompt_R[:, None])
    owner, within = _index_ragged(prompt_R)
    place = first_R[owner] + within
    input_ids_RT.reshape(-1)[place] = np.concatenate(prompts)
    positions_RT.reshape(-1)[place] = within
    segments_RT.reshape(-1)[place] = PROMPT
    owner, within = _index_ragged(length_S - 1)
    place = first_R[row_S[owner]] + column_S[owner] + within
    input_ids_RT.reshape(-1)[place] = batch.tokens[start_S[owner] + within]
    positions_RT.reshape(-1)[place] = prompt_R[row_S[owner]] + within
    segments_RT.reshape(-1)[place] = segment_S[owner]
    sample_tokens_RT.reshape(-1)[place] = batch.sample_tokens_S[branch_S][owner]

    owner, within = _index_ragged(length_S)
    source = start_S[owner] + within
    keep = batch.wanted[source]
    owner, within, source_N = owner[keep], within[keep], source[keep]
    behind_prompt_N = prompt_R[row_S[owner]] - 1
    column_N = np.where(within == 0, behind_prompt_N, column_S[owner] + within - 1)
    predicts_U, which_N = np.unique(first_R[row_S[owner]] + column_N, return_inverse=True)
    return PackedRows(
        input_ids_RT,
        positions_RT,
        segments_RT,
        sample_tokens_RT,
        predicts_U,
        which_N,
        batch.tokens[source_N],
        source_N,
        one_branch_a_row=len(branch_S) == len(rows) and (not flat or len(rows) == 1),
        trees=_trees(prompt_R, first_R, branches_R, length_S - 1) if flat else (),
        media=_place_media(batch, rows, first_R, positions_RT),
    )


def _place_media(
    batch: Batch, rows: Sequence[PackedRow], first_R: Ints, positions_RT: Ints
) -> PlacedMedia | None:
    """Return the media of the rows' prompts, and their places in the flattened rows."""
    if not any(batch.media):
        return None
    spans = [
        RowSpan(row.group, first, first + row.length)
        for row, first in zip(rows, first_R.tolist(), strict=True)
    ]
    return place_media(batch.media_rules, batch.prompts, batch.media, spans, positions_RT)


def visible_in(packed: PackedRows) -> Bools:
    """Return the attention mask [R, T, T] bool of a microbatch in any layout."""
    if not packed.trees:
        return visible(packed.segments_RT)
    seen_RTT = np.zeros((1, *packed.segments_RT.shape[1:] * 2), np.bool_)
    for tree in packed.trees:
        seen_RTT[:, tree.whole, tree.whole] = visible(packed.segments_RT[:, tree.whole])
    return seen_RTT


def visible(segments_RT: Ints) -> Bools:
    """Return the attention mask [R, T, T] bool: token (axis 1) attends to token (axis 2).

    A token attends to the prompt and its own branch. Padding attends to the prompt, so that no row
    of the mask is empty. Its output is not read.
    """
    own = segments_RT[:, :, None] == segments_RT[:, None, :]
    prompt = segments_RT[:, None, :] == PROMPT
    return (own | prompt) & np.tri(segments_RT.shape[1], dtype=np.bool_)


def _sample_of_each_branch(groups: Sequence[Columns], offsets: Sequence[Ints]) -> Ints:
    """Return [S]: the index of each branch's sample, counted over all groups."""
    own = [
        np.asarray(group.get(BRANCH_SAMPLES, np.arange(len(each) - 1)), np.int64)
        for group, each in zip(groups, offsets, strict=True)
    ]
    firsts = np.cumsum([0] + [int(each[-1]) + 1 for each in own])
    return np.concatenate([each + first for each, first in zip(own, firsts, strict=False)])


def _trees(
    prompt_R: Ints, first_R: Ints, branches_R: Ints, tokens_S: Ints
) -> tuple[PromptTree, ...]:
    """Return the groups of a flat row from the token counts of prompts and branches."""
    trees = list[PromptTree]()
    behind_R = (first_R + prompt_R).tolist()
    tokens_R = np.split(tokens_S, np.cumsum(branches_R)[:-1])
    for first, behind, tokens in zip(first_R.tolist(), behind_R, tokens_R, strict=True):
        ends = [behind, *(behind + np.cumsum(tokens)).tolist()]
        branches = tuple(slice(a, b) for a, b in itertools.pairwise(ends) if a < b)
        trees.append(PromptTree(slice(first, behind), branches))
    return tuple(trees)


def _before_in_row(values_S: Ints, row_S: Ints, branches_R: Ints) -> Ints:
    """Return [S]: for each branch, the sum of the values of the branches before it in its row."""
    before = np.cumsum(values_S) - values_S
    first_R = np.cumsum(branches_R) - branches_R
    return before - before[first_R][row_S]


def _index_ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Return every element's owner and its index within the owner, for owners of these lengths."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths) - lengths
    return owner, np.arange(len(owner)) - first[owner]


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Queries, and the keys that the last query attends to. Each earlier query attends to one less.

    The last slice of keys ends with one key per query.
    """

    queries: slice
    keys: tuple[slice, ...]


def list_tree_parts(trees: Sequence[PromptTree]) -> list[AttentionPart]:
    """Return the parts of a flat row of whole groups: prompts, and the branches of each prompt."""
    parts = list[AttentionPart]()
    for tree in trees:
        if tree.is_one_sequence:
            parts.append(AttentionPart(tree.whole, (tree.whole,)))
            continue
        parts.append(AttentionPart(tree.prompt, (tree.prompt,)))
        parts += [AttentionPart(branch, (tree.prompt, branch)) for branch in tree.branches]
    return parts
