"""Holds the response tokens of one sample while it is drawn, and joins samples into a group.

Legend: G samples of the group, B branches over all samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

import numpy as np

from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import OUT_OF_TOKENS, VersionSpans
from offbeat.rollouts.columns import Rollout


@dataclass(slots=True)
class Transcript:
    """Response tokens of one sample, in order of arrival.

    An observation between two turns becomes response tokens with ``loss_mask`` False and logprob
    0.0. Its weight version is that of the first token of the next turn, because this is the first
    token that is computed with the observation in the context.

    If an agent played the sample, ``prompt_ids`` is its prompt, because such samples have separate
    prompts. It is empty if the group has a single prompt.

    The tokens belong to the first branch of the sample. Each further branch is a transcript in
    ``later_branches``, whose reward and times are not read. A turn counts only in the first branch
    that contains it.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    mask: list[bool] = field(default_factory=list[bool])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    finish_reason: str = ""
    incarnation: str = ""
    reward: float = 0.0
    rewards_by_name: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    generate_s: float = 0.0
    reward_s: float = 0.0
    kept_kv: int = 0
    turns: int = 0
    truncated_turns: int = 0
    refused_requests: int = 0  # of an agent, by the endpoint
    prompt_ids: tuple[int, ...] = ()
    answer: str | None = None  # of an evaluation, see ``Receipt.answers``
    later_branches: "list[Transcript]" = field(default_factory=list["Transcript"])

    @property
    def branches(self) -> "tuple[Transcript, ...]":
        """Return this transcript and the later branches of its sample."""
        return (self, *self.later_branches)

    def add_turn(
        self, observation_ids: tuple[int, ...], result: GenerateResult, *, is_context: bool = False
    ) -> None:
        """Add an observation (empty before the first turn) and the turn that answered it.

        With ``is_context``, the turn is trained and counted in an earlier branch of the sample.
        """
        turn_spans = result.version_spans[0]
        for version, count in ((turn_spans[0][0], len(observation_ids)), *turn_spans):
            self._add_span(version, count)
        generated = len(result.token_ids)
        self.token_ids += [*observation_ids, *result.token_ids.tolist()]
        self.mask += [False] * len(observation_ids) + [not is_context] * generated
        self.finish_reason, self.incarnation = result.finish_reasons[0], result.incarnation
        if is_context:
            self.logprobs += [0.0] * (len(observation_ids) + generated)
            return
        self.logprobs += [0.0] * len(observation_ids) + result.logprobs.tolist()
        self.turns += 1
        self.truncated_turns += self.finish_reason == OUT_OF_TOKENS
        self.kept_kv += sum(result.kept_kv)

    def become_masked(self, reason: str, placeholder_id: int, version: int) -> None:
        """Remove every token from the loss, and set the reward to 0.0, which nobody reads.

        The tokens stay, for readers of the rollout files. Packed columns cannot hold a sample
        without tokens. So such a sample gets the token ``placeholder_id``, with logprob 0.0 and
        ``version``.
        """
        if not self.token_ids:
            self.token_ids, self.logprobs, self.spans = [placeholder_id], [0.0], [(version, 1)]
        for branch in self.branches:
            branch.mask = [False] * len(branch.token_ids)
            branch.finish_reason = reason
        self.reward, self.rewards_by_name = 0.0, {}

    def take(self, drawn: "Transcript", later_branches: "Sequence[Transcript]" = ()) -> None:
        """Copy prompt and turns from the branches of a sample. Reward and times do not change."""
        self.prompt_ids, self.later_branches = drawn.prompt_ids, list(later_branches)
        self.token_ids, self.logprobs = drawn.token_ids, drawn.logprobs
        self.mask, self.spans = drawn.mask, drawn.spans
        self.finish_reason, self.incarnation = drawn.finish_reason, drawn.incarnation
        self.kept_kv, self.turns = drawn.kept_kv, drawn.turns
        self.truncated_turns = drawn.truncated_turns

    def move_behind(self, common_ids: tuple[int, ...]) -> None:
        """Move the prompt after ``common_ids`` into an observation before the first turn.

        If the prompt does not begin with ``common_ids``, all of it becomes an observation. Only
        masked samples may have such a prompt, because they are not trained.
        """
        for branch in self.later_branches:
            branch.move_behind(common_ids)
        begins = self.prompt_ids[: len(common_ids)] == common_ids
        rest = self.prompt_ids[len(common_ids) :] if begins else self.prompt_ids
        if rest and self.token_ids:
            (version, count), *later = self.spans
            self.spans = [(version, count + len(rest)), *later]
            self.token_ids = [*rest, *self.token_ids]
            self.logprobs = [0.0] * len(rest) + self.logprobs
            self.mask = [False] * len(rest) + self.mask
        self.prompt_ids = ()

    def _add_span(self, version: int, count: int) -> None:
        if count == 0:
            return
        if self.spans and self.spans[-1][0] == version:
            count += self.spans.pop()[1]
        self.spans.append((version, count))


def common_prompt(prompts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the longest common beginning of all prompts. At least one prompt is required."""
    in_order = sorted(prompts)
    first, last = in_order[0], in_order[-1]  # all between these two share their common part
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return tuple(token for token, _ in same)


def join_samples(prompt_ids: tuple[int, ...], transcripts: Sequence[Transcript]) -> Rollout:
    """Return the group of these samples, in their order. Each branch must have a token."""
    of_samples = [one.branches for one in transcripts]
    rows = list(chain.from_iterable(of_samples))
    lengths = [0, *(len(row.token_ids) for row in rows)]
    spans: tuple[VersionSpans, ...] = tuple(tuple(row.spans) for row in rows)
    branches = tuple(map(len, of_samples))
    kept = tuple(sum(row.kept_kv for row in one) for one in of_samples)
    truncated = tuple(sum(row.truncated_turns for row in one) for one in of_samples)
    turns = tuple(sum(row.turns for row in one) for one in of_samples)
    refused = tuple(one.refused_requests for one in transcripts)
    has_answers = any(one.answer is not None for one in transcripts)
    named = {name: 0.0 for one in transcripts for name in one.rewards_by_name}
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=np.array([i for row in rows for i in row.token_ids], dtype=np.int32),
        logprobs=np.array([p for row in rows for p in row.logprobs], dtype=np.float32),
        loss_mask=np.array([m for row in rows for m in row.mask], dtype=np.bool_),
        offsets=np.cumsum(lengths, dtype=np.int64),
        version_spans=spans,
        # The last turn of a sample ends its last branch.
        finish_reasons=tuple(one[-1].finish_reason for one in of_samples),
        engine_incarnation=next(row.incarnation for row in rows if row.incarnation),
        generate_s=max(one.generate_s for one in transcripts),
        reward_s=max(one.reward_s for one in transcripts),
        kept_kv=kept if any(kept) else (),
        truncated_turns=truncated if any(truncated) else (),
        turns=turns if any(count != 1 for count in turns) else (),
        rewards_by_name=tuple(
            (name, tuple(one.rewards_by_name.get(name, 0.0) for one in transcripts))
            for name in sorted(named)
        ),
        answers=tuple(one.answer or "" for one in transcripts) if has_answers else (),
        branches=branches if any(count != 1 for count in branches) else (),
        refused_requests=refused if any(refused) else (),
    )
