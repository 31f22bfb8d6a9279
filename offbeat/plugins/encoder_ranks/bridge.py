"""Messages between encoder ranks and language ranks: features one way, gradients back.

A message is a header and values. The receiver knows the expected header and compares all of it. It
discards a message of an earlier, aborted exchange. Any other difference is an error.

``Exchange`` runs the rounds of messages about media between the sides of a grid, for any backend.

``match_media`` finds the media that a lane reads among the media of its encoder rank. It uses only
numpy. Media are identified by a digest of their arrays. So features only reach a lane that reads
the same media, for any distribution of groups.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final, Protocol, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.messages.media import Media
from offbeat.plugins.encoder_ranks.errors import BridgeMismatch, ProvenanceMismatch
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.tower_plan import SETTING
from offbeat.plugins.tensor_ranks.tensor_proof import check_copies
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.ranks.peers import Peers, all_reduce_max_or_fail, run_on_all_ranks

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Kind(enum.IntEnum):
    """Meaning of the values of a message."""

    FEATURES = 0
    GRADIENTS = 1


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number of a dtype in headers."""
    return _DTYPES.index(dtype)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which feature gradients are summed and sent: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Header:
    """Header that identifies one message of a world."""

    exchange: int  # counter of exchanges in a world; an aborted attempt has a lower number
    step: int
    kind: int
    lane: int
    provenance: int  # digest of the list of pictures that the lane reads
    blocks: int  # number of feature blocks: the features, and one per deeper layer
    features: int  # of one block
    hidden: int
    dtype: int  # index in ``_DTYPES``

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the values: blocks, features, hidden."""
        return self.blocks, self.features, self.hidden


FIELDS: Final = 9
_ABOUT: Final = 4  # header fields of shape and dtype


class Wire(Protocol):
    """Moves tensors between this rank and another rank. Both calls block until completion."""

    def send(self, tensor: Tensor, rank: int) -> None: ...

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill ``tensor`` with the next tensor from ``rank``."""
        ...


class ProcessGroupWire:
    """Wire over the world's process group, with its timeout."""

    def send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        dist.recv(tensor, rank)


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank received over the bridge in a step, and the seconds spent."""

    nbytes: int = 0
    seconds: float = 0.0  # spent in receive, including the wait for the sender


def share_values(
    values: Tensor | None, holder: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Broadcast values [blocks, F, H] from one rank of a group to all its ranks.

    Args:
        values: Values on the holder, None on the other ranks.
        holder: World rank that holds the values.
        group: Group of the ranks.
        device: Device of the tensors that the group sends.
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
        """Send values [blocks, features, hidden] and complete the header's shape and dtype."""
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
        """Receive the expected message of a rank. Return its values [blocks, features, hidden].

        Args:
            due: Expected header. With 0 blocks, the sender defines blocks, hidden size and dtype.
            rank: The sender.

        Raises:
            BridgeMismatch: A different message of this exchange, or a later one, arrived.
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


class MergedMedia(msgspec.Struct, frozen=True, eq=False):
    """Batch of the media of several prompts, with the number of prompts per lane."""

    media: tuple[Media, ...]  # lane after lane, each in the order named by its lane
    counts: tuple[int, ...]  # by lane


def digest_media(media: Media) -> str:
    """Return the digest of the media of a prompt."""
    digest = xxhash.xxh3_128()
    for name, each in sorted(media.items()):
        digest.update(f"{name} {each.dtype} {each.shape}".encode())
        digest.update(np.ascontiguousarray(each).data)
    return digest.hexdigest()


def list_digest(digests: Iterable[str]) -> int:
    """Return a 63-bit digest of a list of digests."""
    return xxhash.xxh3_64_intdigest("\n".join(digests).encode()) >> 1


def media_read(microbatches: Iterable[PackedRows]) -> list[Media]:
    """Return the media that microbatches read, in the order of their places, with repetitions."""
    placed = (packed.media for packed in microbatches if packed.media is not None)
    return [media for each in placed for media in each.media]


def match_media(rank: int, named: Sequence[Sequence[str]], own: Iterable[Media]) -> MergedMedia:
    """Return an encoder rank's media in the order named by its lanes.

    Args:
        rank: The encoder rank.
        named: By lane, the digests of the media that it reads, each once.
        own: Media of the rank's groups, in any order.

    Raises:
        ProvenanceMismatch: ``own`` and the named media differ.
    """
    there = {digest_media(media): media for media in own}
    wanted = [digest for lane in named for digest in lane]
    missing, surplus = set(wanted) - there.keys(), there.keys() - set(wanted)
    if missing or surplus:
        raise ProvenanceMismatch(rank, len(missing), len(surplus))
    return MergedMedia(tuple(there[digest] for digest in wanted), tuple(map(len, named)))


T = TypeVar("T")
_NAMES: Final = msgspec.msgpack.Decoder(list[str])
_TRAFFIC: Final = msgspec.msgpack.Decoder(tuple[int, float])


def prove_sides(peers: Peers, model: str, prove: Callable[[], tuple[float, str]]) -> None:
    """Prove the cut models of both sides. All ranks must call it together.

    Args:
        peers: The ranks of the world.
        model: Name of the model's class.
        prove: Proves this rank's part and returns a result like ``copies_gap``.

    Raises:
        UntrainableModel: The ranks compute different values than the whole model. All ranks raise.
    """
    apart = run_on_all_ranks(peers, "the proof of the cut", prove)
    check_copies(model, apart, peers, f"trainer.tensor_parallel or {SETTING}")


class Exchange:
    """Rounds of messages of one rank about media, with the ranks of the other side."""

    def __init__(
        self, trainer: ModelTrainerConfig, peers: Peers, next_step: Callable[[], int]
    ) -> None:
        """Create the exchange without sending anything.

        Args:
            trainer: Section of the recipe.
            peers: All ranks of the world, of both sides.
            next_step: Returns the number of the next step. Messages contain it.
        """
        self.peers, self.grid = peers, side_grid(trainer)
        self.bridge = Bridge(peers.rank, torch.device(trainer.device))
        self._next_step = next_step
        self._count = 0  # exchanges of this world so far, including aborted ones

    def begin_step(self) -> None:
        """Start counting the traffic of a step."""
        self.bridge.traffic = Traffic()

    def measure(self) -> dict[str, float]:
        """Return metrics of the traffic of a step. All ranks must call it together."""
        traffic = self.bridge.traffic
        seen = self.peers.all_gather((traffic.nbytes, traffic.seconds), _TRAFFIC)
        return {
            "train/bridge_bytes": float(sum(nbytes for nbytes, _ in seen)),
            "train/bridge_s": max(seconds for _, seconds in seen),
        }

    def pass_on_all_ranks(self, during: str, work: Callable[[], T]) -> T:
        """Run passes of this rank's side while the other side waits. All ranks continue, or none.

        A side of one rank reports its error, and all ranks end the call together. On a larger side,
        the other ranks may be inside a collective that the failed rank never enters. So they could
        not answer a report, and the rank raises without one. The controller then receives this
        error immediately, not the timeouts of the others.
        """
        side = self.grid.find_side(self.peers.rank)
        if len(self.grid.list_ranks(side)) == 1:
            return run_on_all_ranks(self.peers, during, work)
        made = work()
        self.wait_for_all(during)
        return made

    def wait_for_all(self, during: str) -> None:
        """Wait until all ranks have done the work ``during``. Raise ``PeerFailed`` if one cannot.

        Ranks in ``run_on_all_ranks`` also join, because it reduces one number too.
        """
        all_reduce_max_or_fail(self.peers, during, [0], None)

    def name_media(self, digests: Sequence[str]) -> list[list[str]]:
        """Begin an exchange and return the digests of the media that each lane reads."""
        self._count += 1
        named = self.peers.all_gather(list(digests), _NAMES)
        return [named[self.grid.find_receiver(lane)] for lane in range(self.grid.data)]

    def header(self, kind: Kind, lane: int, named: Sequence[Sequence[str]]) -> Header:
        """Return the header of a lane's message, without the shape and dtype of its values."""
        provenance = list_digest(named[lane])
        return Header(self._count, self._next_step(), kind, lane, provenance, 0, 0, 0, 0)
