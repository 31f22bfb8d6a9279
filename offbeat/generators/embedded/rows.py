"""Sampling state of the running rows, and the requests that they belong to.

Legend: R rows, S stop tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.generators.embedded.request import OpenRequest
from offbeat.generators.embedded.sampling import draw, noise_key, uniforms

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
