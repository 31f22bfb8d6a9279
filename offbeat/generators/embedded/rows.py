"""Sampling state of the running rows, and the requests of these rows.

Tokens are drawn with counter-based noise, a function of seed, sample and position.

Legend: R rows, S stop tokens, T ticks, V vocabulary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from offbeat.generators.embedded.request import OpenRequest
from offbeat.messages.generation import SamplingParams

_MASK_64 = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # the odd number nearest 2**64 / golden ratio
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def noise_key(seed: int, sample: int) -> int:
    """Return the signed 64-bit stream key of one sample of a request with this seed."""
    return _to_signed(_mix(_mix(seed & _MASK_64) + (sample + 1) * _WEYL & _MASK_64))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1 - 2**-52], a pure function of (key, position).

    They are the output of SplitMix64 (Steele, Lea, Flood 2014) at ``position``. The state after n
    draws is ``key + n * weyl``, so any position can be computed without its predecessors.

    Args:
        keys: [R] or [R, 1] int64 from ``noise_key``.
        positions: [R] or [R, T] int64, positions of the tokens in their sequences.

    Returns:
        float64, shaped like ``positions``.
    """
    mixed = keys + positions * _to_signed(_WEYL)
    mixed = (mixed ^ _shift_right(mixed, 30)) * _to_signed(_MIX_1)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _to_signed(_MIX_2)
    mixed = mixed ^ _shift_right(mixed, 31)
    return _shift_right(mixed, 12).to(torch.float64) * 2.0**-52


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters that limit the tokens each row may draw. A filter that no row uses is None.

    They apply to the probabilities after the temperature, in vLLM's order (``Sampler`` in
    vllm/v1/sample/sampler.py, 0.32): ``min_p``, ``top_k``, ``top_p``.
    """

    min_p_R: Tensor | None = None
    """[R] minimum probabilities, as fractions of the row's highest one. 0 keeps every token."""

    top_k_R: Tensor | None = None
    """[R] numbers of most probable tokens to keep. Ties with the last stay. Infinity keeps all."""

    top_p_R: Tensor | None = None
    """[R] nucleus masses, as fractions of the mass that the other filters keep. Infinity keeps
    every token."""

    def find_filtered_rows(self) -> Tensor:
        """Return whether each row has a filter, [R] bool."""
        used = self._find_limited_rows()
        if self.top_p_R is not None:
            used.append(self.top_p_R < 1)
        return reduce(torch.logical_or, used)

    def weights(self, sorted_RV: Tensor) -> Tensor:
        """Return probabilities with 0 for each removed token, [R, V].

        Args:
            sorted_RV: [R, V] probabilities, each row in descending order.
        """
        kept_RV = sorted_RV
        if self.min_p_R is not None:
            least_R1 = self.min_p_R[:, None] * sorted_RV[:, :1]
            kept_RV = kept_RV.masked_fill(kept_RV < least_R1, 0)
        if self.top_k_R is not None:
            last_R = self.top_k_R.clamp(max=sorted_RV.shape[1]).long() - 1
            kept_RV = kept_RV.masked_fill(kept_RV < kept_RV.gather(1, last_R[:, None]), 0)
        if self.top_p_R is not None:
            sums_RV = kept_RV.cumsum(-1, dtype=torch.float64)
            most_R = self.top_p_R
            if limits := self._find_limited_rows():
                # A row without filters keeps its exact bound, even if other rows have filters
                most_R = torch.where(
                    reduce(torch.logical_or, limits), most_R * sums_RV[:, -1], most_R
                )
            kept_RV = kept_RV.masked_fill(sums_RV - kept_RV >= most_R[:, None], 0)
        return kept_RV

    def _find_limited_rows(self) -> list[Tensor]:
        """Return whether each row uses ``min_p``, and ``top_k``, [R] bool each."""
        limits = list[Tensor]()
        if self.min_p_R is not None:
            limits.append(self.min_p_R > 0)
        if self.top_k_R is not None:
            limits.append(self.top_k_R < math.inf)
        return limits


def draw(
    logits_RV: Tensor, temperature_R: Tensor, noise_R: Tensor, filters: Filters | None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the distribution function at ``noise``.

    Args:
        logits_RV: [R, V], any float type. float64 is computed in float64, others in float32.
        temperature_R: [R] in the type of the computation, > 0.
        noise_R: [R] float64 in [0, 1 - 2**-52].
        filters: Filters of the tokens, or None if no row has any.

    Returns:
        Tokens [R] int64, whose probability is never 0, and their logprobs [R] (natural log) under
        ``softmax(logits / temperature)`` over the whole vocabulary, before ``filters`` apply.
        A row whose logits are not finite gets a NaN logprob and an arbitrary token of the
            vocabulary.
    """
    logprobs_RV = torch.log_softmax(logits_RV.to(temperature_R.dtype) / temperature_R[:, None], -1)
    probs_RV = logprobs_RV.exp()
    tokens_R = _invert(probs_RV, noise_R)
    if filters is not None:
        # A row without filters draws the same token whether or not other rows have filters
        filtered_R = _draw_filtered(probs_RV, noise_R, filters)
        tokens_R = torch.where(filters.find_filtered_rows(), filtered_R, tokens_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


def _draw_filtered(probs_RV: Tensor, noise_R: Tensor, filters: Filters) -> Tensor:
    """Draw one token per row, [R], from the tokens that the filters keep."""
    sorted_RV, tokens_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    weights_RV = filters.weights(sorted_RV)
    return tokens_RV.gather(1, _invert(weights_RV, noise_R)[:, None])[:, 0]


def _invert(weights_RV: Tensor, noise_R: Tensor) -> Tensor:
    """Return the first index [R] at which a row's running sum exceeds ``noise`` times its total."""
    # float64, because a float32 running sum over a large vocabulary would lose rare tokens
    sums_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    targets_R1 = (noise_R * sums_RV[:, -1])[:, None]
    index_R = torch.searchsorted(sums_RV, targets_R1, right=True)[:, 0]
    return index_R.clamp_(max=weights_RV.shape[1] - 1)  # only a NaN row is beyond


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * _MIX_1 & _MASK_64
    value = (value ^ value >> 27) * _MIX_2 & _MASK_64
    return value ^ value >> 31


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift [R, T] right, with zeros in place of the sign bits that torch shifts in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


_NO_TOKEN = -1
_NOISE_TICKS = 8  # ticks computed at once, in about the time of one tick


def _filter_values(sampling: SamplingParams) -> tuple[float, float, float]:
    """Return ``min_p``, ``top_k`` and ``top_p`` in the form of ``Filters``."""
    top_p = sampling.top_p if sampling.top_p < 1 else math.inf
    return sampling.min_p, sampling.top_k or math.inf, top_p


class RunningRows:
    """Sampling parameters and owners of the running rows, in the order of the cache's rows.

    Use it only inside ``torch.inference_mode``.
    """

    def __init__(
        self, capacity: int, eos_token_ids: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.owners: list[tuple[OpenRequest, int]] = []  # [R] request, sample index
        self._eos = tuple(eos_token_ids)
        self._streams = torch.zeros(capacity, 4, dtype=torch.int64, device=device)
        self._starts, self._rotary_starts, self._keys, self._limits = self._streams.unbind(1)
        self._next_limit: float = math.inf  # the lowest of ``_limits``
        self._noise = torch.zeros(capacity, _NOISE_TICKS, dtype=torch.float64, device=device)
        self._noise_from = -_NOISE_TICKS  # tick of its first column
        self._temperatures = torch.ones(capacity, dtype=dtype, device=device)
        # One tensor, so that an unused filter costs no operation
        self._filters = torch.zeros(capacity, 3, dtype=torch.float64, device=device)
        self._min_ps, self._top_ks, self._top_ps = self._filters.unbind(1)
        self._stops = torch.full((capacity, 0), _NO_TOKEN, dtype=torch.int64, device=device)
        self._has_min_p = self._has_top_k = self._has_top_p = False  # in any row

    def __len__(self) -> int:
        return len(self.owners)

    def append(self, requests: Sequence[OpenRequest]) -> None:
        """Add the samples of these requests. Their starts must be set."""
        added = [
            (request, index) for request in requests for index in range(request.request.samples)
        ]
        new = slice(len(self), len(self) + len(added))
        self.owners += added
        stops = [self._eos + request.request.sampling.stop_token_ids for request in requests]
        self._widen_stops(max(map(len, stops)))
        width = self._stops.shape[1]
        counts = torch.tensor([request.request.samples for request in requests])
        for column, values in (
            (self._temperatures, [request.request.sampling.temperature for request in requests]),
            (self._filters, [_filter_values(request.request.sampling) for request in requests]),
            (self._stops, [(*ids, *[_NO_TOKEN] * (width - len(ids))) for ids in stops]),
        ):
            column[new] = torch.tensor(values, dtype=column.dtype).repeat_interleave(counts, 0)
        self._streams[new] = torch.tensor(
            [
                (each.start, each.start - each.shift, noise_key(each.seed, index), each.last_new)
                for each, index in added
            ]
        )
        self._next_limit = min(self._next_limit, *(each.last_new for each in requests))
        self._noise_from = -_NOISE_TICKS  # new rows have no noise yet
        self._add_filters(requests)

    def keep_only(
        self, holes: Tensor, movers: Tensor, owners: list[tuple[OpenRequest, int]]
    ) -> None:
        """Move each mover to a hole's place, [holes] both. ``owners`` own the remaining rows."""
        if len(holes):
            for column in (
                self._streams,
                self._noise,
                self._temperatures,
                self._filters,
                self._stops,
            ):
                column.index_copy_(0, holes, column.index_select(0, movers))
        self.owners = owners
        self._next_limit = int(self._limits[: len(owners)].min()) if owners else math.inf
        if self._is_filtered:
            self._has_min_p = self._has_top_k = self._has_top_p = False
            self._add_filters(dict.fromkeys(owner for owner, _ in owners))

    def rotary_positions(self, tick: int) -> Tensor:
        """Return the rotary position [R] of this tick's token of each row."""
        return tick - self._rotary_starts[: len(self)]

    def draw(self, logits_RV: Tensor, tick: int) -> tuple[Tensor, Tensor]:
        """Draw the tokens [R] of all rows at this tick. Return them and their logprobs [R].

        The function ``draw`` describes the method.
        """
        temperature_R = self._temperatures[: len(self)]
        return draw(logits_RV, temperature_R, self._noise_at(tick), self._filters_in_use())

    def find_rows_at_limit(self, tick: int) -> list[int]:
        """Return the rows whose token at this tick is their last one."""
        if tick < self._next_limit:
            return []
        return (self._limits[: len(self)] <= tick).nonzero()[:, 0].tolist()

    def find_stopped(self, tokens_R: Tensor) -> list[int]:
        """Return the rows that drew one of their stop tokens."""
        if not self._stops.shape[1]:
            return []
        stopped_R = (tokens_R[:, None] == self._stops[: len(self)]).any(1)
        return stopped_R.nonzero()[:, 0].tolist() if stopped_R.any() else []

    def _noise_at(self, tick: int) -> Tensor:
        """Return the noise [R] of every row at this tick. Compute it for the next ticks, too."""
        rows, noise = len(self), self._noise
        if tick >= self._noise_from + _NOISE_TICKS:
            ahead_T = torch.arange(_NOISE_TICKS, device=noise.device)
            positions_RT = tick + ahead_T - self._starts[:rows, None]
            noise[:rows] = uniforms(self._keys[:rows, None], positions_RT)
            self._noise_from = tick
        return noise[:rows, tick - self._noise_from]

    def _widen_stops(self, width: int) -> None:
        missing = width - self._stops.shape[1]
        if missing > 0:
            self._stops = torch.nn.functional.pad(self._stops, (0, missing), value=_NO_TOKEN)

    @property
    def _is_filtered(self) -> bool:
        return self._has_min_p or self._has_top_k or self._has_top_p

    def _filters_in_use(self) -> Filters | None:
        if not self._is_filtered:
            return None
        rows = len(self)
        return Filters(
            min_p_R=self._min_ps[:rows] if self._has_min_p else None,
            top_k_R=self._top_ks[:rows] if self._has_top_k else None,
            top_p_R=self._top_ps[:rows] if self._has_top_p else None,
        )

    def _add_filters(self, requests: Iterable[OpenRequest]) -> None:
        sampling = [request.request.sampling for request in requests]
        self._has_min_p |= any(each.min_p > 0 for each in sampling)
        self._has_top_k |= any(each.top_k > 0 for each in sampling)
        self._has_top_p |= any(each.top_p < 1 for each in sampling)
