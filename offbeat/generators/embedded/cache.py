"""Key-value cache of all running rows, indexed by one shared clock.

Every decode step writes one column for all rows at once: the column of the tick ``now``. The prompt
of a new row is written to the columns just before ``now``. So a row owns the columns from its
``start`` to ``now``, and a mask hides earlier columns. Therefore a step writes one slice for rows
of any length, and the attended width is the length of the longest running row. Mask, tokens and
logprobs are kept in *planes* with the same layout as keys and values, and move with them.

Legend: R rows, H heads, C columns, D head dimension, B prompts of one prefill, P padded length.
"""

# pyright: reportIncompatibleVariableOverride=false, reportUnknownMemberType=false
# torch declares some functions without types. transformers declares the planes as optional.

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LayerStates = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, H, P, D]."""

_FIRST_COLUMNS = 32


class _Window:
    """Range of columns in use. Ticks are absolute numbers; a tick's column is tick - base."""

    def __init__(self) -> None:
        self.rows = 0
        self.base = 0  # tick of column 0
        self.first = 0  # oldest tick any row still reads
        self.now = 0  # tick the next decode step writes

    @property
    def width(self) -> int:
        return self.now - self.first


class _ClockedLayer(CacheLayerMixin):
    """View of the cache for one attention layer of the model, during a decode step."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, window: _Window, keys: Tensor, values: Tensor) -> None:
        """Wrap the planes of the layer, [row capacity, H, column capacity, D] each."""
        super().__init__()
        self._window = window
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise: the planes exist from the start, so no states [R, H, 1, D] may initialize them."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the tick's states [R, H, 1, D] and return all attended states [R, H, C, D]."""
        window = self._window
        keys, values = self.keys[: window.rows], self.values[: window.rows]
        column, first = window.now - window.base, window.first - window.base
        keys[:, :, column : column + 1] = key_states
        values[:, :, column : column + 1] = value_states
        return keys[:, :, first : column + 1], values[:, :, first : column + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.width

    def get_max_length(self) -> int:
        return -1


class ClockedCache(Cache):
    """Keys, values, mask, tokens and logprobs of the running rows. Grows on demand, never shrinks.

    Use it only inside ``torch.inference_mode``. Call order of a step: ``newest_tokens``, ``mask``,
    a forward over this cache, ``advance``, ``append`` for new rows, ``record``, ``keep_only``.
    """

    def __init__(
        self, *, dtype: torch.dtype, logprob_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self._clocked: list[_ClockedLayer] = []  # entries of ``layers`` with their own type
        self._window = _Window()
        # CUDA's attention kernels read the mask in aligned blocks
        self._alignment = 16 if device.type == "cuda" else 1
        self._row_capacity, self._columns = 0, 0
        self._mask = torch.empty(0, 1, 0, 1, dtype=dtype, device=device)
        self._tokens = torch.empty(0, 1, 0, 1, dtype=torch.int64, device=device)
        self._logprobs = torch.empty(0, 1, 0, 1, dtype=logprob_dtype, device=device)

    @property
    def rows(self) -> int:
        return self._window.rows

    @property
    def now(self) -> int:
        """Tick of the newest token, the same for every row."""
        return self._window.now

    def clear(self) -> None:
        """Forget all rows and free memory, so that the next layout does not depend on them."""
        self.layers = self._clocked = []
        self._window.rows = 0
        self._row_capacity, self._columns = 0, 0
        self._mask = self._mask.new_empty(0, 1, 0, 1)
        self._tokens = self._tokens.new_empty(0, 1, 0, 1)
        self._logprobs = self._logprobs.new_empty(0, 1, 0, 1)

    # -- the decode step ---------------------------------------------------------------------------

    def newest_tokens(self) -> Tensor:
        """Return the input of the next decode step, [R, 1]."""
        return self._tokens[: self.rows, 0, self._window.now - self._window.base]

    def mask(self) -> Tensor:
        """Return the additive mask [R, 1, 1, C] over the columns that the next step reads."""
        window = self._window
        first, end = window.first - window.base, window.now + 1 - window.base
        return self._mask[: window.rows, :, first:end].transpose(2, 3)

    def advance(self) -> None:
        """Advance the clock by one tick, past the column that the decode step wrote."""
        if self.rows:
            self._make_room(prompt_columns=0, after=2)
        self._window.now += 1

    def record(self, tokens_R: Tensor, logprobs_R: Tensor) -> None:
        """Store the newest token of every row, at the tick ``now``."""
        rows, column = self.rows, self._window.now - self._window.base
        self._tokens[:rows, 0, column, 0] = tokens_R
        self._logprobs[:rows, 0, column, 0] = logprobs_R

    def history(self, rows: Tensor, since: int) -> tuple[Tensor, Tensor]:
        """Return tokens and logprobs of these rows from tick ``since``.

        [rows, now + 1 - since] each.
        """
        window = self._window
        ticks = slice(since - window.base, window.now + 1 - window.base)
        tokens, logprobs = self._tokens[:, 0, ticks, 0], self._logprobs[:, 0, ticks, 0]
        return tokens.index_select(0, rows), logprobs.index_select(0, rows)

    # -- rows that join and end --------------------------------------------------------------------

    def append(self, prefilled: LayerStates, lengths_B: Tensor, source_R: Tensor) -> None:
        """Add rows after the existing ones, each with its prompt in the columns before ``now``.

        Args:
            prefilled: Keys and values of the prompts, padded on the right.
            lengths_B: [B] int64 on the CPU: the length of each prompt.
            source_R: [new rows] int64: index of each new row's prompt.
        """
        padded = int(lengths_B.max())
        self._make_room(prompt_columns=padded, after=2)
        self._make_rows(len(source_R), prefilled)
        window = self._window
        new = slice(window.rows, window.rows + len(source_R))
        self._lower_first(window.now - padded)
        now, first = window.now - window.base, window.first - window.base
        shift_BP = _right_aligned(lengths_B, padded, source_R.device)
        for layer, (keys, values) in zip(self._clocked, prefilled, strict=True):
            for plane, prompts in ((layer.keys, keys), (layer.values, values)):
                plane[new, :, first : now - padded] = 0  # masked, but a stale NaN would spread
                aligned = prompts if shift_BP is None else _gather_columns(prompts, shift_BP)
                plane[new, :, now - padded : now] = aligned.index_select(0, source_R)
        hidden_BC = torch.arange(now) < now - lengths_B[:, None]
        mask = self._mask.new_zeros(len(lengths_B), self._columns)
        mask[:, :now].masked_fill_(hidden_BC.to(mask.device), float("-inf"))
        self._mask[new, 0, :, 0] = mask.index_select(0, source_R)
        window.rows += len(source_R)

    def keep_only(self, holes: Tensor, movers: Tensor, rows: int, first: int) -> None:
        """Shrink to ``rows`` rows by moving each of ``movers`` into one of ``holes``.

        Args:
            holes: [holes] places of ended rows below ``rows``.
            movers: [holes] places of running rows from ``rows`` on.
            rows: number of remaining rows.
            first: oldest tick that a remaining row reads.
        """
        window = self._window
        columns = slice(window.first - window.base, window.now + 1 - window.base)
        if len(holes):
            for plane in self._planes():
                used = plane[:, :, columns]
                used.index_copy_(0, holes, used.index_select(0, movers))
        window.rows = rows
        column = first - window.base
        window.first = first - column % self._alignment

    # -- memory ------------------------------------------------------------------------------------

    def _planes(self) -> list[Tensor]:
        """Return all planes, [row capacity, H or 1, column capacity, D or 1] each."""
        layers = [plane for layer in self._clocked for plane in (layer.keys, layer.values)]
        return [*layers, self._mask, self._tokens, self._logprobs]

    def _lower_first(self, tick: int) -> None:
        """Make the columns from ``tick`` on readable by all rows."""
        window = self._window
        column = tick - window.base
        tick = window.base + column - column % self._alignment
        if window.rows == 0:
            window.first = tick
        elif tick < window.first:
            for layer in self._clocked:
                for plane in (layer.keys, layer.values):
                    plane[: window.rows, :, tick - window.base : window.first - window.base] = 0
            window.first = tick

    def _make_room(self, prompt_columns: int, after: int) -> None:
        """Grow or move columns to fit a prompt before ``now``, and ``after`` ticks after it."""
        window = self._window
        column = window.now - window.base
        if window.rows == 0:
            window.first = window.now
        elif column >= prompt_columns and column + after <= self._columns:
            return
        start = max(prompt_columns - window.width, 0)
        start += -start % self._alignment
        needed = start + window.width + after
        # Moving the columns in use costs as much as writing them again, so leave room for as many
        # steps
        if needed * 4 > self._columns * 3:
            self._resize(
                self._row_capacity, max(_FIRST_COLUMNS, 2 * self._columns, needed * 3 // 2)
            )
        self._move_window(start)

    def _move_window(self, start: int) -> None:
        """Move the oldest tick in use to this column."""
        window = self._window
        old = slice(window.first - window.base, window.now + 1 - window.base)
        new = slice(start, start + window.width + 1)
        if window.rows and old != new:
            for plane in self._planes():
                plane[: window.rows, :, new] = plane[: window.rows, :, old].clone()
            self._mask[: window.rows, :, : new.start] = float("-inf")
            self._mask[: window.rows, :, new.stop :] = 0
        window.base = window.first - start

    def _make_rows(self, more: int, like: LayerStates) -> None:
        """Make room for ``more`` rows. Create missing layers, shaped like ``like``."""
        needed = self._window.rows + more
        if not self._clocked:
            self._clocked = [
                _ClockedLayer(
                    self._window,
                    _empty_like(keys, self._row_capacity, self._columns),
                    _empty_like(values, self._row_capacity, self._columns),
                )
                for keys, values in like
            ]
            self.layers = [*self._clocked]
        if needed > self._row_capacity:
            self._resize(max(needed, 2 * self._row_capacity), self._columns)

    def _resize(self, rows: int, columns: int) -> None:
        columns += -columns % 16
        self._row_capacity, self._columns = rows, columns
        for layer in self._clocked:
            layer.keys, layer.values = (
                _grown(p, rows, columns) for p in (layer.keys, layer.values)
            )
        self._mask = _grown(self._mask, rows, columns)
        self._tokens = _grown(self._tokens, rows, columns)
        self._logprobs = _grown(self._logprobs, rows, columns)


def _empty_like(plane: Tensor, rows: int, columns: int) -> Tensor:
    """Return zeros, [rows, H, columns, D], with H and D of ``plane`` [R, H, C, D]."""
    return plane.new_zeros(rows, plane.shape[1], columns, plane.shape[3])


def _grown(plane: Tensor, rows: int, columns: int) -> Tensor:
    """Return a copy of ``plane`` [R, H, C, D] with room for [rows, H, columns, D]."""
    grown = _empty_like(plane, rows, columns)
    grown[: plane.shape[0], :, : plane.shape[2]] = plane
    return grown


def _right_aligned(lengths_B: Tensor, padded: int, device: torch.device) -> Tensor | None:
    """Return the column permutation [B, P] that right-aligns prompts, or None without padding.

    The first token of a shorter prompt is repeated on its left. These copies are masked, and finite
    if the prompt's values are finite.
    """
    if bool((lengths_B == padded).all()):
        return None
    return (torch.arange(padded) - (padded - lengths_B)[:, None]).clamp_(min=0).to(device)


def _gather_columns(prompts: Tensor, columns_BP: Tensor) -> Tensor:
    """Return the columns of ``prompts`` [B, H, P, D] in a different order, of the same shape."""
    index = columns_BP[:, None, :, None].expand(-1, prompts.shape[1], -1, prompts.shape[3])
    return prompts.gather(2, index)
