"""Entry of a rank into a world over real process groups, where a rank is lost on the way."""

from world import COLLECTIVE_S, HOST, World

from offbeat.trainers.rank import WorldEntry
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.ranks.process_group import leave
from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store_server import StoreServer

LOST = 1  # the rank that leaves while the model is made


def enters_twice(
    peers: Peers, first: WorldRendezvous, second: WorldRendezvous
) -> tuple[list[str], list[int]]:
    """What a rank raised in a world that loses a rank, and the sizes of the worlds it made a model in.

    The process that is lost is replaced, which is to say that it has an entry of its own.
    """
    rank, made, raised = peers.rank, list[int](), list[str]()
    leave()  # the world of the job

    def make(found: Peers) -> None:
        found.all_reduce_max([0])
        made.append(found.size)

    entry = WorldEntry(rank, "cpu", lambda: HOST)
    if rank == LOST:
        entry.join(first, lambda _: leave())
        entry = WorldEntry(rank, "cpu", lambda: HOST)
    else:
        try:
            entry.join(first, make)
        except RuntimeError as error:
            raised.append("lost" if peers.are_lost(error) else repr(error))
    entry.join(second, make)
    return raised, made


def test_a_rank_whose_peer_is_lost_while_the_model_is_made_may_enter_the_next_world(
    world: World,
) -> None:
    """It is fit itself: only an error of its own is raised again to whoever asks later."""
    key = SharedKey.random()
    server = StoreServer(HOST, key)
    address = StoreAddress(HOST, server.port, key)
    first, second = (
        WorldRendezvous(name, address, 2, COLLECTIVE_S) for name in ("first", "second")
    )
    try:
        answers = world.run(2, "test_world_entry:enters_twice", first=first, second=second)
    finally:
        server.close()
    assert answers == [(["lost"], [2]), ([], [2])]
