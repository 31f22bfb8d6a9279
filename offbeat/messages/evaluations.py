"""Records of an evaluation: every sample that was scored at one weight version."""

import msgspec

from offbeat.messages.media import Thumbnail


class ScoredSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sample of an evaluation."""

    set: str  # name of its set; empty: the only set, which has no name
    prompt_index: int  # position in the set
    row: int  # index in the source of the set
    sample: int
    reward: float  # if the sample is not valid: 0.0, which means nothing
    is_valid: bool  # a masked sample has failed, and counts in no score
    is_correct: bool  # its reward reaches ``eval.correct_from``
    answer: str | None  # final answer, empty for none; None: the environment extracts no answers
    finish_reason: str
    response_tokens: int
    turns: int
    # Text of the response, bounded; None: the environment has no tokenizer, or an older file
    response: str | None = None
    prompt: str | None = None  # row of the set as JSON, bounded; None: an older file
    # Of a prompt's first sample: small copies of its first media, as the model reads them
    previews: tuple[Thumbnail, ...] = ()
    environment_s: float | None = (
        None  # of the group, in environment and reward; None: an older file
    )
    branches: int = 1  # of an agent's sample; ``response`` has the text of each


class EvaluatedVersion(msgspec.Struct, frozen=True):
    """All samples of one evaluation."""

    due: int  # version that was due
    version: int  # version that was scored: a newer one if no engine still served ``due``
    samples: tuple[ScoredSample, ...]
