import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import keys_of, tokens_of

from offbeat.algorithms.diagnostics import BINS, EDGES, SpreadRows, spread, spread_metrics
from offbeat.algorithms.losses import LOSSES, LossTokens, clipped_pg
from offbeat.algorithms.staleness_buckets import (
    FIRSTS,
    LABELS,
    ON_POLICY_GAP,
    ON_POLICY_TOKENS,
    metric_name,
)
from offbeat.algorithms.tokens import valid_tokens
from offbeat.config.sections.loss import (
    CispoLossConfig,
    ClippedPgLossConfig,
    GspoLossConfig,
    LossConfig,
    SftLossConfig,
)
from offbeat.telemetry.metric_table import METRICS

BUCKET_OF = {0: "0", 1: "1", 2: "2_3", 3: "2_3", 4: "4_up", 5: "4_up", 100: "4_up"}
MANY = (400, 300, 300, 1)


def rows(tokens: LossTokens, config: ClippedPgLossConfig = ClippedPgLossConfig()) -> SpreadRows:  # noqa: B008 - frozen
    sums = clipped_pg(tokens, config)
    assert sums.spread is not None
    return sums.spread.tolist()


def log_ratios(tokens: LossTokens, label: str) -> np.ndarray:
    """Of the valid tokens of a bucket."""
    assert tokens.staleness_N is not None and tokens.generation_N is not None
    own = [
        bool(valid) and BUCKET_OF.get(int(age), "4_up") == label
        for valid, age in zip(tokens.mask_N, tokens.staleness_N, strict=True)
    ]
    return (tokens.logprobs_N.detach() - tokens.generation_N).numpy()[np.array(own)]


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_each_bucket_tells_of_its_own_tokens(seed: int) -> None:
    tokens = tokens_of(seed, MANY)
    got, total = spread_metrics([rows(tokens)]), int(tokens.mask_N.sum())
    for label in LABELS:
        gaps = log_ratios(tokens, label)
        ratios = np.exp(gaps)
        want = {
            "behaviour_kl": float(np.mean(ratios - gaps - 1)),
            "ess": float(ratios.sum() ** 2 / np.square(ratios).sum() / len(ratios)),
            "token_fraction": len(ratios) / total,
        }
        for name, value in want.items():
            assert got[metric_name(name, label)] == pytest.approx(value, rel=1e-9)
        for q in (5, 50, 95):
            log_got = math.log(got[metric_name(f"ratio_p{q:02d}", label)])
            low, high = np.percentile(gaps, [max(q - 2, 0), min(q + 2, 100)])
            assert low - abs(low) / 6 - 1e-4 <= log_got <= high + abs(high) / 6 + 1e-4


@pytest.mark.parametrize("value", [0.0, 3e-6, 4e-3, -0.5, 1.0, -19.0, 40.0, -1e4])
def test_a_percentile_is_within_a_bin_of_the_value(value: float) -> None:
    drawn = tokens_of(0)
    assert drawn.generation_N is not None
    tokens = replace(drawn, logprobs_N=drawn.generation_N + value)
    bounded = max(-20.0, min(20.0, value))
    ratios = [got for name, got in spread_metrics([rows(tokens)]).items() if "ratio_p" in name]
    assert ratios
    for got in ratios:
        assert abs(math.log(got) - bounded) <= max(abs(bounded) / 6, 1e-4)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_clip_fractions_of_the_buckets_make_up_that_of_the_step(seed: int) -> None:
    tokens = tokens_of(seed, MANY)
    sums = clipped_pg(tokens, ClippedPgLossConfig(dual_clip=1.3, clip_high=0.1))
    assert sums.spread is not None
    got = spread_metrics([sums.spread.tolist()])
    parts = [
        got[metric_name("clip_fraction", label)] * got[metric_name("token_fraction", label)]
        for label in LABELS
    ]
    names = ("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual")
    at_bound = sum(float(sums.metrics[f"train/{name}"].value) for name in names)
    assert sum(parts) == pytest.approx(at_bound / int(tokens.mask_N.sum()))


BOUNDED = {
    "ppo": ClippedPgLossConfig(clip_low=0.1, clip_high=0.2),
    "dual": ClippedPgLossConfig(clip_low=0.1, clip_high=0.2, dual_clip=1.4),
    "gspo": GspoLossConfig(clip_low=0.01, clip_high=0.02),
    "cispo": CispoLossConfig(clip_low=0.1, clip_high=0.2),
    "sft": SftLossConfig(),
    "dropped": ClippedPgLossConfig(
        old_logprobs="policy", icepop_band=(0.9, 1.1), count_dropped=False
    ),
}


@pytest.mark.parametrize("config", BOUNDED.values(), ids=BOUNDED)
def test_a_bucket_tells_which_of_its_own_tokens_a_bound_holds(config: LossConfig) -> None:
    """What a band dropped is in it all the same: it is the data that the numbers are about."""
    tokens, keys = tokens_of(7, MANY), keys_of(config)
    sums, want = LOSSES[config.name](tokens, config), dict[str, list[float]]()
    assert sums.spread is not None and tokens.staleness_N is not None
    log_r = (tokens.logprobs_N.detach() - tokens.old_N).tolist()
    valid = [i for i, each in enumerate(tokens.mask_N.tolist()) if each]
    sequence = tokens.sequence_N.tolist()
    if config.name == "gspo":
        means = {
            s: float(np.mean([log_r[i] for i in valid if sequence[i] == s]))
            for s in {sequence[i] for i in valid}
        }
        log_r = [means.get(s, 0.0) for s in sequence]
    for i in valid:
        r, a = math.exp(log_r[i]), float(tokens.advantages_N[i])
        low, high = r < 1 - keys.clip_low, r > 1 + keys.clip_high
        at_bound = (low and a < 0) or (high and a > 0)
        at_bound |= keys.dual_clip is not None and a < 0 and r > keys.dual_clip
        at_bound = (low or high) if config.name == "cispo" else at_bound
        label = BUCKET_OF.get(int(tokens.staleness_N[i]), "4_up")
        want.setdefault(label, []).append(at_bound and config.name != "sft")
    got = spread_metrics([sums.spread.tolist()])
    assert {label: got[metric_name("clip_fraction", label)] for label in LABELS} == {
        label: pytest.approx(float(np.mean(want[label])), abs=1e-12) for label in LABELS
    }


@pytest.mark.parametrize("q", [5, 50, 95])
def test_a_percentile_has_its_share_of_the_tokens_below_it(q: int) -> None:
    """Up to the bin it lies in, wherever in the histogram that is."""
    rng = np.random.default_rng(q)
    for scale in (1e-5, 1e-3, 0.1, 3.0):
        drawn = tokens_of(0, (4000, 1))
        assert drawn.generation_N is not None
        gaps = torch.from_numpy(rng.standard_t(3, 4001) * scale)
        tokens = replace(
            drawn,
            logprobs_N=drawn.generation_N + gaps,
            mask_N=torch.arange(4001) < 4000,
            staleness_N=torch.zeros(4001, dtype=torch.int64),
        )
        got = math.log(spread_metrics([rows(tokens)])[metric_name(f"ratio_p{q:02d}", "0")])
        want = float(np.percentile(gaps[:4000].clamp(-20, 20).numpy(), q))
        assert abs(got - want) <= max(abs(want) / 6, 1e-4)


def test_a_percentile_that_the_tokens_of_a_bin_make_up_exactly_is_the_end_of_that_bin() -> None:
    """5 of 100 tokens in the bin 10, 45 in 20, 45 in 30 and 5 in 40."""
    counts = [0.0] * BINS
    counts[10], counts[20], counts[30], counts[40] = 5, 45, 45, 5
    sums = [0.0, 0.0, 100.0, 100.0, 0.0, 0.0]
    empty = [0.0] * (BINS + len(sums))
    got = spread_metrics([[[*counts, *sums], *[empty] * (len(LABELS) - 1)]])
    for q, place in ((5, 10), (50, 20), (95, 30)):
        assert math.log(got[metric_name(f"ratio_p{q:02d}", "0")]) == pytest.approx(EDGES[place])


@pytest.mark.parametrize(("age", "label"), BUCKET_OF.items())
def test_an_age_has_one_bucket(age: int, label: str) -> None:
    drawn = tokens_of(0)
    tokens = replace(drawn, staleness_N=torch.full_like(drawn.sequence_N, age))
    got = spread_metrics([rows(tokens)])
    assert {name.partition("_at_")[2] for name in got if "_at_" in name} == {label}
    assert got[metric_name("token_fraction", label)] == 1


def test_on_policy_nothing_is_spread() -> None:
    drawn = tokens_of(0)
    assert drawn.generation_N is not None
    tokens = replace(drawn, logprobs_N=drawn.generation_N.clone())
    metrics = spread_metrics([rows(tokens)])
    ones = {name: got for name, got in metrics.items() if "/ess" in name or "/ratio_p" in name}
    zeros = {name: got for name, got in metrics.items() if "/behaviour_kl" in name}
    assert ones == pytest.approx(dict.fromkeys(ones, 1), abs=1e-4)
    assert zeros == dict.fromkeys(zeros, 0)
    assert ones and zeros


def test_the_gap_on_policy_leaves_out_sequences_with_an_older_token() -> None:
    """Their later tokens were drawn over keys and values of older weights, and differ for that."""
    drawn = tokens_of(3, (50, 50, 50, 1))
    staleness_N = torch.zeros_like(drawn.sequence_N)
    staleness_N[(drawn.sequence_N == 1).nonzero()[0]] = 1
    tokens = replace(drawn, staleness_N=staleness_N)
    assert tokens.generation_N is not None
    gap_N = (tokens.logprobs_N.detach() - tokens.generation_N).abs()
    counted_N = tokens.mask_N & ((tokens.sequence_N == 0) | (tokens.sequence_N == 2))
    if not tokens.mask_N[(drawn.sequence_N == 1).nonzero()[0]]:
        counted_N |= tokens.mask_N & (tokens.sequence_N == 1)
    got = spread_metrics([rows(tokens)])[ON_POLICY_GAP]
    assert got == pytest.approx(float(gap_N[counted_N].mean()))


def test_the_gap_on_policy_comes_with_the_number_of_its_tokens() -> None:
    drawn = tokens_of(0, (20, 1))
    fresh = replace(drawn, staleness_N=torch.zeros_like(drawn.sequence_N))
    one, three = (spread_metrics([rows(fresh)] * parts) for parts in (1, 3))
    assert one[ON_POLICY_TOKENS] == int(drawn.mask_N.sum())
    assert three[ON_POLICY_TOKENS] == 3 * one[ON_POLICY_TOKENS]
    assert three[ON_POLICY_GAP] == pytest.approx(one[ON_POLICY_GAP])
    old = spread_metrics([rows(replace(drawn, staleness_N=torch.ones_like(drawn.sequence_N)))])
    assert old[ON_POLICY_TOKENS] == 0 and ON_POLICY_GAP not in old


def test_parts_are_added_whoever_has_them() -> None:
    one, other = (rows(tokens_of(seed, MANY)) for seed in (0, 1))
    total = (torch.tensor(one) + torch.tensor(other)).tolist()
    assert spread_metrics([one, other]) == pytest.approx(spread_metrics([total]))


def test_nothing_comes_of_nothing() -> None:
    drawn = tokens_of(0)
    empty = replace(drawn, mask_N=torch.zeros_like(drawn.mask_N))
    assert spread_metrics([]) == spread_metrics([rows(empty)]) == {}


def test_every_name_is_declared() -> None:
    names = spread_metrics([rows(tokens_of(0, MANY))]).keys() - {ON_POLICY_GAP, ON_POLICY_TOKENS}
    declared = {name for name in METRICS if name.startswith("staleness/")}
    assert names == declared


def test_buckets_and_edges_are_in_order() -> None:
    assert len(LABELS) == len(FIRSTS) and list(FIRSTS) == sorted(FIRSTS)
    assert list(EDGES) == sorted(EDGES) and len(set(EDGES)) == len(EDGES)


def test_the_spread_carries_no_gradient() -> None:
    tokens = tokens_of(0)
    assert tokens.staleness_N is not None
    made = spread(valid_tokens(tokens), tokens.staleness_N, tokens.mask_N)
    assert not made.requires_grad and made.dtype is torch.float64
