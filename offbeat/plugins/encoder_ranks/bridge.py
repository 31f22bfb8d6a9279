"""Messages between an encoder rank and a language rank: features there, their gradients back.

A message is a header and values. The receiver knows the header that is due, and compares all of it: a
message of an earlier exchange, whose attempt was aborted, is discarded, and any other is an error.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

import enum
import time
from dataclasses import astuple, dataclass, replace
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.plugins.encoder_ranks.errors import BridgeMismatch

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Kind(enum.IntEnum):
    """Meaning of the values of a message."""

    FEATURES = 0
    GRADIENTS = 1


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number by which a header names a dtype."""
    return _DTYPES.index(dtype)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of features are summed and sent: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Header:
    """Names one message of a world."""

    exchange: int  # counts the exchanges of a world: that of an aborted attempt is lower
    step: int
    kind: int
    lane: int
    provenance: int  # digest of the list of pictures that the lane reads
    blocks: int  # features, and the features of deeper layers
    features: int  # of one block
    hidden: int
    dtype: int  # its place in ``_DTYPES``

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the values: blocks, features, hidden."""
        return self.blocks, self.features, self.hidden


FIELDS: Final = 9
_ABOUT: Final = 4  # shape and dtype of values


class Wire(Protocol):
    """Moves tensors between this rank and another one; both block until it is done."""

    def send(self, tensor: Tensor, rank: int) -> None: ...

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill ``tensor`` with what ``rank`` sends next."""
        ...


class ProcessGroupWire:
    """A wire of the process group of the world, with its timeout."""

    def send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        dist.recv(tensor, rank)


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank received over the bridge in a step, and the time it took."""

    nbytes: int = 0
    seconds: float = 0.0  # inside receive: it waits for the sender, too


def shared_values(
    values: Tensor | None, holder: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return values [blocks, F, H] that one rank of a group holds, on all of them.

    Args:
        values: Of the holder; None on the other ranks.
        holder: Rank of the world.
        group: The ranks.
        device: Where they take tensors from.
    """
    about = torch.zeros(_ABOUT, dtype=torch.int64, device=device)
    if values is not None:
        about = torch.tensor([*values.shape, dtype_code(values.dtype)], device=device)
    dist.broadcast(about, src=holder, group=group)
    if values is None:
        numbers: list[int] = about.tolist()
        *shape, code = numbers
        values = torch.empty(shape, dtype=_DTYPES[code], device=device)
    dist.broadcast(values, src=holder, group=group)
    return values


class Bridge:
    """Sends and receives the messages of one rank."""

    def __init__(self, rank: int, device: torch.device, wire: Wire | None = None) -> None:
        self._rank, self._device = rank, device
        self._wire = wire or ProcessGroupWire()
        self.traffic = Traffic()

    def send(self, header: Header, values: Tensor, rank: int) -> None:
        """Send values [blocks, features, hidden] of a header that leaves shape and dtype open."""
        blocks, features, hidden = values.shape
        full = replace(
            header,
            blocks=blocks,
            features=features,
            hidden=hidden,
            dtype=dtype_code(values.dtype),
        )
        self._wire.send(torch.tensor(astuple(full), device=self._device), rank)
        self._wire.send(values.detach().contiguous(), rank)

    def receive(self, due: Header, rank: int) -> Tensor:
        """Return the values [blocks, features, hidden] of the message that is due from a rank.

        Args:
            due: Its header. No blocks: they, the hidden size and the dtype are the sender's to say.
            rank: The sender.

        Raises:
            BridgeMismatch: Another message came, of this exchange or a later one.
        """
        started = time.perf_counter()
        while True:
            fields = torch.zeros(FIELDS, dtype=torch.int64, device=self._device)
            self._wire.receive(fields, rank)
            numbers: list[int] = fields.tolist()
            got = Header(*numbers)
            values = torch.empty(got.shape, dtype=_DTYPES[got.dtype], device=self._device)
            self._wire.receive(values, rank)
            self.traffic.nbytes += fields.nbytes + values.nbytes
            if got.exchange >= due.exchange:
                break
        self.traffic.seconds += time.perf_counter() - started
        want = due
        if not due.blocks:
            want = replace(due, blocks=got.blocks, hidden=got.hidden, dtype=got.dtype)
        if got != want:
            raise BridgeMismatch(self._rank, rank, str(got), str(want))
        return values
