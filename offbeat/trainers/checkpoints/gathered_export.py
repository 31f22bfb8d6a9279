"""Writing of weights by rank 0 while all ranks gather them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from torch import Tensor

from offbeat.trainers.ranks.peers import PeerFailed, Peers

_DURING: Final = "the export"


class _Failure(msgspec.Struct, frozen=True):
    """A failure of rank 0 in the form that the others receive."""

    text: str
    is_of_disk: bool


_FAILURES: Final = msgspec.msgpack.Decoder[_Failure | None](_Failure | None)


def write_on_first_rank(
    weights: Iterable[tuple[str, Tensor]],
    peers: Peers,
    write: Callable[[Iterator[tuple[str, Tensor]]], None],
) -> None:
    """Let rank 0 write weights as all ranks gather them. All ranks call it.

    Ranks other than 0 return when it is done. Weights that a failed ``write`` left are gathered all
    the same, and dropped, because the other ranks wait in their collectives.

    Raises:
        OSError: The disk failed. Every rank raises it.
        Exception: What else ``write`` raised, on rank 0.
        PeerFailed: On the others.
    """
    gathered, failure = iter(weights), None
    if peers.rank == 0:
        try:
            write(gathered)
        except Exception as error:
            if peers.are_lost(error):
                raise
            failure = error
    for _ in gathered:
        pass
    own = None if failure is None else _Failure(str(failure), isinstance(failure, OSError))
    failed = peers.broadcast(own, _FAILURES)
    if failure is not None:
        raise failure
    if failed is not None:
        raise OSError(failed.text) if failed.is_of_disk else PeerFailed(peers.rank, 0, _DURING)
