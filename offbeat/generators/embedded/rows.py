"""Sampling state of the running rows, and the requests that they belong to.

Tokens are drawn with counter-based noise: a function of seed, sample and position.

Legend: R rows, S stop tokens, V vocabulary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.generators.embedded.request import OpenRequest

_MASK_64 = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # the odd number nearest 2**64 / golden ratio
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def noise_key(seed: int, sample: int) -> int:
    """Return the signed 64-bit stream key of one sample of a request with this seed."""
    return _signed(_mix(_mix(seed & _MASK_64) + (sample + 1) * _WEYL & _MASK_64))


def uniforms(keys_R: Tensor, positions_R: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1 - 2**-52], one per row: a pure function of (key, position).

    SplitMix64 (Steele, Lea, Flood 2014) read at ``position``: the state after n draws is
    ``key + n * weyl``, so that any position is reached without its predecessors.

    Args:
        keys_R: [R] int64 from ``noise_key``.
        positions_R: [R] int64, position of the token in its sequence.

    Returns:
        [R] float64.
    """
    mixed = keys_R + positions_R * _signed(_WEYL)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_MIX_1)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_MIX_2)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 12).to(torch.float64) * 2.0**-52


def draw(
    logits_RV: Tensor, temperature_R: Tensor, noise_R: Tensor, top_p_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the distribution function at ``noise``.

    Args:
        logits_RV: [R, V], any float type. Computed in float32, or in float64 if given in it.
        temperature_R: [R] in the type of the computation, > 0.
        noise_R: [R] float64 in [0, 1 - 2**-52].
        top_p_R: [R] nucleus masses in (0, 1], or None if every one is 1.

    Returns:
        Tokens [R] int64, never one of probability 0; and their natural logprobs [R] under
        ``softmax(logits / temperature)`` over the whole vocabulary, before ``top_p`` cuts it.
        A row of logits that is not finite gives a NaN logprob and some token of the vocabulary.
    """
    logprobs_RV = torch.log_softmax(logits_RV.to(temperature_R.dtype) / temperature_R[:, None], -1)
    probs_RV = logprobs_RV.exp()
    tokens_R = _invert(probs_RV, noise_R)
    if top_p_R is not None:
        # A row that keeps every token draws the same one whether or not another row is cut
        tokens_R = torch.where(top_p_R < 1, _draw_nucleus(probs_RV, noise_R, top_p_R), tokens_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


def _draw_nucleus(probs_RV: Tensor, noise_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Draw one token per row, [R], from the most probable ones that reach a mass of ``top_p``."""
    sorted_RV, tokens_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    mass_before_RV = sorted_RV.cumsum(-1, dtype=torch.float64) - sorted_RV
    nucleus_RV = sorted_RV.masked_fill(mass_before_RV >= top_p_R[:, None], 0)
    return tokens_RV.gather(1, _invert(nucleus_RV, noise_R)[:, None])[:, 0]


def _invert(weights_RV: Tensor, noise_R: Tensor) -> Tensor:
    """Return the first index in each row whose running sum exceeds ``noise`` of its total, [R]."""
    # float64: over a large vocabulary a float32 running sum would lose the rare tokens
    sums_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    targets_R1 = (noise_R * sums_RV[:, -1])[:, None]
    index_R = torch.searchsorted(sums_RV, targets_R1, right=True)[:, 0]
    return index_R.clamp_(max=weights_RV.shape[1] - 1)  # only a NaN row is beyond


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * _MIX_1 & _MASK_64
    value = (value ^ value >> 27) * _MIX_2 & _MASK_64
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right, [R] to [R], without the sign, which torch shifts in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


_NO_TOKEN = -1


class RunningRows:
    """Sampling parameters and owners of the running rows, in the order of the cache's rows.

    Use inside ``torch.inference_mode`` only.
    """

    def __init__(
        self, capacity: int, eos_token_ids: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.owners: list[tuple[OpenRequest, int]] = []  # [R] request, sample index
        self._eos = tuple(eos_token_ids)
        self._starts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._shifts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._keys = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(capacity, dtype=dtype, device=device)
        self._top_ps = torch.ones(capacity, dtype=torch.float64, device=device)
        self._stops = torch.full((capacity, 0), _NO_TOKEN, dtype=torch.int64, device=device)
        self._cut_rows = 0  # rows with top_p below 1

    def __len__(self) -> int:
        return len(self.owners)

    def append(self, requests: Sequence[OpenRequest]) -> None:
        """Add the samples of these requests, which have been given their start."""
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
            (self._starts, [request.start for request in requests]),
            (self._shifts, [request.shift for request in requests]),
            (self._temperatures, [request.request.sampling.temperature for request in requests]),
            (self._top_ps, [request.request.sampling.top_p for request in requests]),
            (self._stops, [(*ids, *[_NO_TOKEN] * (width - len(ids))) for ids in stops]),
        ):
            column[new] = torch.tensor(values, dtype=column.dtype).repeat_interleave(counts, 0)
        self._keys[new] = torch.tensor([noise_key(request.seed, index) for request, index in added])
        self._count_cut_rows()

    def keep_only(
        self, holes: Tensor, movers: Tensor, owners: list[tuple[OpenRequest, int]]
    ) -> None:
        """Move each mover to the place of a hole, [holes] both; ``owners`` are of the rows left."""
        if len(holes):
            for column in (
                self._starts,
                self._shifts,
                self._keys,
                self._temperatures,
                self._top_ps,
                self._stops,
            ):
                column.index_copy_(0, holes, column.index_select(0, movers))
        self.owners = owners
        if self._cut_rows:
            self._count_cut_rows()

    def positions(self, tick: int) -> Tensor:
        """Return the position of this tick's token in each row's sequence, [R]."""
        return tick - self._starts[: len(self)]

    def rotary_positions(self, tick: int) -> Tensor:
        """Return the position [R] by which the model rotates this tick's token of each row."""
        return self.positions(tick) + self._shifts[: len(self)]

    def draw(self, logits_RV: Tensor, tick: int) -> tuple[Tensor, Tensor]:
        """Return the token of every row at this tick, [R], and its logprob, [R].

        ``sampling.draw`` says how they are drawn.
        """
        rows = len(self)
        noise_R = uniforms(self._keys[:rows], self.positions(tick))
        top_p_R = self._top_ps[:rows] if self._cut_rows else None
        return draw(logits_RV, self._temperatures[:rows], noise_R, top_p_R)

    def stopped(self, tokens_R: Tensor) -> list[int]:
        """Return the rows whose token is one of their stop tokens."""
        if not self._stops.shape[1]:
            return []
        stopped_R = (tokens_R[:, None] == self._stops[: len(self)]).any(1)
        return stopped_R.nonzero()[:, 0].tolist() if stopped_R.any() else []

    def _widen_stops(self, width: int) -> None:
        missing = width - self._stops.shape[1]
        if missing > 0:
            self._stops = torch.nn.functional.pad(self._stops, (0, missing), value=_NO_TOKEN)

    def _count_cut_rows(self) -> None:
        self._cut_rows = sum(owner.request.sampling.top_p < 1 for owner, _ in self.owners)
