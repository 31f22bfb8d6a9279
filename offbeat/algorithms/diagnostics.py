"""Computes off-policy diagnostics by staleness, as sums over microbatches, chunks and ranks.

The behaviour ratio is ``exp(logprob - generation)``: the probability under the policy being
trained, divided by the probability under the policy that sampled. It is not the surrogate's ratio,
which may have a different denominator.

Legend: B buckets of staleness, N tokens, S sequences, K sums. These sums are a histogram of
log-ratios, tokens clipped by a bound, KL, ratios and squared ratios. For sequences without older
tokens there are also the gaps of logprobs, and the tokens.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from offbeat.algorithms.kl import kl_penalty
from offbeat.algorithms.staleness_buckets import (
    FIRSTS,
    LABELS,
    ON_POLICY_GAP,
    ON_POLICY_TOKENS,
    PERCENTILES,
    metric_name,
)
from offbeat.algorithms.tokens import LOG_RATIO_LIMIT, ValidTokens, ratio

_FINEST: Final = 1e-4  # log-ratios closer to 0 share one bin
_PER_DECADE: Final = 16
_STEPS: Final = math.ceil(_PER_DECADE * math.log10(LOG_RATIO_LIMIT / _FINEST))
_OUTWARD: Final = tuple(_FINEST * 10 ** (i / _PER_DECADE) for i in range(_STEPS))
EDGES: Final = (*(-each for each in reversed(_OUTWARD)), *_OUTWARD)
"""Inner edges of the histogram's bins: the same number per decade on both sides of 0.

A percentile's log-ratio is then off by at most one part in six, or 1e-4.
"""
BINS: Final = len(EDGES) + 1
SpreadRows = list[list[float]]
"""Result of ``spread`` as numbers: one row per bucket."""


@torch.no_grad()
def spread(tokens: ValidTokens, staleness_N: Tensor, bounded_N: Tensor) -> Tensor:
    """Compute the sums of one microbatch, float64 [B, K]. Add them up and call ``spread_metrics``.

    Args:
        tokens: Tokens of the microbatch.
        staleness_N: [N] integers: weight versions between a token and its training. Invalid tokens
            may have any value.
        bounded_N: [N] bool, whether a bound of the loss clipped the token.
    """
    mask_N, device = tokens.mask_N, tokens.mask_N.device
    log_ratio_N = tokens.logprobs_N - tokens.generation_N
    ratio_N = ratio(log_ratio_N).double()
    edges, firsts = _thresholds(device)
    bucket_N = torch.bucketize(staleness_N.long(), firsts, right=True)
    place_N = bucket_N * BINS + torch.bucketize(log_ratio_N.double(), edges)
    counts = torch.zeros(len(FIRSTS) * BINS, dtype=torch.float64, device=device)
    counts.index_add_(0, place_N, mask_N.double())  # counts are exact in any order
    kl_N = kl_penalty(tokens.generation_N, tokens.logprobs_N, "k3")
    # A token after an older token of its sequence attended to keys and values of older weights.
    age_N = torch.where(mask_N, staleness_N.long(), 0)
    oldest_S = torch.zeros_like(tokens.counts_S, dtype=torch.int64)
    oldest_S = oldest_S.scatter_reduce(0, tokens.sequence_N, age_N, "amax")
    unmixed_N = (oldest_S[tokens.sequence_N] == age_N).double()
    gap_N = log_ratio_N.abs().double() * unmixed_N
    values = [bounded_N.double(), kl_N.double(), ratio_N, ratio_N.square(), gap_N, unmixed_N]
    buckets = torch.arange(len(FIRSTS), device=device)
    member_BN = ((bucket_N == buckets[:, None]) & mask_N).double()
    return torch.cat([counts.view(len(FIRSTS), BINS), member_BN @ torch.stack(values, -1)], -1)


def spread_metrics(parts: Iterable[SpreadRows]) -> dict[str, float]:
    """Return the metrics of a whole step from the sums of its parts. Empty buckets have no metrics.

    ``ratio_p05``, ``ratio_p50`` and ``ratio_p95`` are percentiles of the behaviour ratio over
    tokens, read from the histogram. ``clip_fraction`` is the share of tokens clipped by a bound of
    the loss. ``behaviour_kl`` is KL(behaviour || trained) by k3, in nats per token. ``ess`` is the
    effective sample size with the ratios as weights, ``(sum w)^2 / sum w^2``, as a fraction of the
    tokens. ``token_fraction`` is the bucket's share of the step. For the whole step,
    ``off_policy/logprob_gap_on_policy`` is the mean distance of the logprobs over sequences that
    have only tokens of staleness 0. The number of these tokens is also returned.
    """
    buckets = [[sum(each) for each in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
    step_tokens = sum(sum(row[:BINS]) for row in buckets)
    metrics = dict[str, float]()
    for label, row in zip(LABELS, buckets, strict=bool(buckets)):
        counts, (bounded, kl, weights, squares, gaps, unmixed) = row[:BINS], row[BINS:]
        tokens = sum(counts)
        if not tokens:
            continue
        named = {f"ratio_p{q:02d}": math.exp(_percentile(counts, q)) for q in PERCENTILES}
        named |= {
            "clip_fraction": bounded / tokens,
            "behaviour_kl": kl / tokens,
            "ess": weights**2 / squares / tokens,
            "token_fraction": tokens / step_tokens,
        }
        metrics |= {metric_name(name, label): value for name, value in named.items()}
        if label == LABELS[0] and unmixed:
            metrics |= {ON_POLICY_GAP: gaps / unmixed, ON_POLICY_TOKENS: unmixed}
    return metrics and {ON_POLICY_TOKENS: 0.0, **metrics}


def _percentile(counts: Sequence[float], percent: int) -> float:
    """Return the percentile of the log-ratio, interpolated linearly within its bin."""
    bounds = (-LOG_RATIO_LIMIT, *EDGES, LOG_RATIO_LIMIT)
    wanted, seen = sum(counts) * percent / 100, 0.0
    for place, count in enumerate(counts):
        if count and seen + count >= wanted:
            low, high = bounds[place], bounds[place + 1]
            return low + (high - low) * (wanted - seen) / count
        seen += count
    raise AssertionError(counts)  # unreachable: ``wanted`` is less than the sum


@cache
def _thresholds(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the edges of the histogram's bins, [bins - 1], and of the buckets, [buckets - 1]."""
    edges = torch.tensor(EDGES, dtype=torch.float64, device=device)
    return edges, torch.tensor(FIRSTS[1:], device=device)
