"""Computes scores of an evaluation with their standard errors: mean@k, pass@k, maj@k. Pure.

A standard error is computed over prompts, because the samples of one prompt are not independent
(Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640, section 2.2).

Legend: n valid samples of a prompt, c of them correct, k samples that a user would draw.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbeat.messages.evaluations import ScoredSample


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over prompts with its standard error, which is None with fewer than two prompts."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True)
class SetScores:
    """Scores of one evaluation set. ``k`` samples were drawn for each prompt."""

    prompts: int
    samples: int  # valid samples
    masked_samples: int
    k: int
    mean: Estimate  # reward of a prompt's samples: mean@k
    pass_at: dict[int, Estimate]  # by k: powers of two, and all samples
    majority: Estimate | None  # maj@k of all samples; None: no answers, or one sample each
    response_tokens: float  # mean


def scores_by_set(samples: Iterable[ScoredSample]) -> dict[str, SetScores]:
    """Return the scores of each set that has a valid sample, in order of appearance."""
    sets = defaultdict[str, dict[int, list[ScoredSample]]](lambda: defaultdict(list))
    for sample in samples:
        sets[sample.set][sample.prompt_index].append(sample)
    return {
        name: _scores(list(prompts.values()))
        for name, prompts in sets.items()
        if any(sample.is_valid for samples in prompts.values() for sample in samples)
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return an unbiased estimate of the probability that any of ``k`` samples is correct.

    This is ``1 - C(n-c, k) / C(n, k)``: Chen et al. 2021, "Evaluating Large Language Models Trained
    on Code", arXiv:2107.03374, equation 1. Needs ``k <= n``.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_score(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Return the correctness of the most frequent answer (self-consistency, arXiv:2203.11171).

    An empty answer has no vote. Without any vote, the score is 0. If several answers have the most
    votes, they count equally, which is the mean over all ways to break the tie. The correctness of
    an answer is the mean over its samples.
    """
    votes = defaultdict[str, list[bool]](list)
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer:
            votes[answer].append(is_correct)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return statistics.fmean(
        statistics.fmean(voters) for voters in votes.values() if len(voters) == most
    )


def _scores(prompts: Sequence[Sequence[ScoredSample]]) -> SetScores:
    drawn = max(map(len, prompts))
    valid = [[sample for sample in prompt if sample.is_valid] for prompt in prompts]
    scored = [prompt for prompt in valid if prompt]
    everything = [sample for prompt in scored for sample in prompt]
    has_answers = any(sample.answer is not None for sample in everything)
    return SetScores(
        prompts=len(prompts),
        samples=len(everything),
        masked_samples=sum(map(len, prompts)) - len(everything),
        k=drawn,
        mean=_estimate([statistics.fmean(one.reward for one in prompt) for prompt in scored]),
        pass_at={
            k: _estimate(passed) for k in _ks(drawn) if (passed := _compute_pass_at_k(scored, k))
        },
        majority=_estimate([_majority(prompt) for prompt in scored])
        if has_answers and drawn > 1
        else None,
        response_tokens=statistics.fmean(sample.response_tokens for sample in everything),
    )


def _ks(drawn: int) -> list[int]:
    """Return the powers of two up to the number of samples, and that number."""
    return sorted({*(1 << power for power in range(drawn.bit_length())), drawn})


def _compute_pass_at_k(prompts: Sequence[Sequence[ScoredSample]], k: int) -> list[float]:
    """Return pass@k of each prompt that has at least k valid samples."""
    return [
        pass_at_k(len(prompt), sum(sample.is_correct for sample in prompt), k)
        for prompt in prompts
        if len(prompt) >= k
    ]


def _majority(prompt: Sequence[ScoredSample]) -> float:
    return majority_score(
        [sample.answer or "" for sample in prompt], [sample.is_correct for sample in prompt]
    )


def _estimate(values: Sequence[float]) -> Estimate:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)
