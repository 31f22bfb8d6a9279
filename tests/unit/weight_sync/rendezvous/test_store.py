"""The store that processes of a run meet at: for holders of its key, and for strangers."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# torch exports these names without declaring it, and declares less than it exports.

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import (
    AllreduceOptions,
    HashStore,
    PrefixStore,
    ReduceOp,
    Store,
)
from torch.distributed.distributed_c10d import ProcessGroupGloo

from offbeat.weight_sync.rendezvous.frames import Count, SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store import SharedStore
from offbeat.weight_sync.rendezvous.store_server import MOST_STRANGERS, StoreServer

HOST, KEY, PATIENT_S = "127.0.0.1", SharedKey(b"k" * 32), 20.0


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(HOST, KEY)
    yield made
    made.close()


def client(server: StoreServer, timeout_s: float = PATIENT_S, key: SharedKey = KEY) -> SharedStore:
    return SharedStore(StoreAddress(HOST, server.port, key), timeout_s)


def stranger(server: StoreServer) -> socket.socket:
    return socket.create_connection((HOST, server.port), timeout=PATIENT_S)


def is_closed(connection: socket.socket) -> bool:
    """Wait for the other side to close; what it says before that is not for a stranger."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# --- for holders of the key --------------------------------------------------------------------------

KEYS, VALUES = st.sampled_from("abc"), st.sampled_from(["", "1", "23"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("check"), st.lists(KEYS, max_size=2)),
)


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(CALLS, max_size=12))
def test_it_answers_as_the_librarys_own_store_does(calls: list[tuple[object, ...]]) -> None:
    server = StoreServer(HOST, KEY)
    theirs, ours = HashStore(), client(server)
    for name, *arguments in calls:
        answers = [getattr(store, str(name))(*arguments) for store in (theirs, ours)]
        assert answers[0] == answers[1], (name, arguments)
    for key in "abc":
        if theirs.check([key]):
            assert ours.get(key) == theirs.get(key)
    server.close()


def test_numbers_are_added_up_and_several_keys_go_at_once(server: StoreServer) -> None:
    store, other = client(server), client(server).clone()
    assert [store.add("n", 2), other.add("n", -3), store.get("n")] == [2, -1, b"-1"]
    store.multi_set(["x", "y"], ["1", "2"])
    assert other.multi_get(["y", "x"]) == [b"2", b"1"]


def test_whoever_waits_for_a_key_gets_it_as_soon_as_it_is_set(server: StoreServer) -> None:
    got = list[bytes]()
    waiting = threading.Thread(target=lambda: got.append(client(server).get("late")))
    waiting.start()
    client(server).set("late", b"\x00\xff")
    waiting.join(PATIENT_S)
    assert got == [b"\x00\xff"]


def test_a_key_that_is_not_set_in_time_is_named(server: StoreServer) -> None:
    store = client(server)
    with pytest.raises(dist.DistStoreError, match=r"not there after 2 s: absent"):
        store.wait(["absent"], timedelta(seconds=2))
    store.set_timeout(timedelta(seconds=1.5))
    with pytest.raises(dist.DistStoreError, match=r"not there after 1\.5 s: absent"):
        store.get("absent")


def test_a_prefix_is_forgotten_and_nothing_else(server: StoreServer) -> None:
    store = client(server)
    store.multi_set(["1.a/0/k", "1.a/1/k", "1.ab/k"], ["", "", ""])
    server.forget("1.a/")
    assert store.num_keys() == 1
    assert store.check(["1.ab/k"])


def test_a_server_that_ends_is_an_error_of_the_network(server: StoreServer) -> None:
    store = client(server)
    store.set("a", "b")
    server.close()
    with pytest.raises(dist.DistNetworkError, match=f"{HOST}:{server.port} cannot be reached"):
        store.get("a")
    with pytest.raises(dist.DistNetworkError):
        client(server)


def test_it_closes_while_a_client_is_connected_and_others_connect() -> None:
    """asyncio's own servers wait for their connections since Python 3.12.1."""
    server = StoreServer(HOST, KEY)
    connected, failures = client(server, timeout_s=10 * PATIENT_S), list[Exception]()

    def wait() -> None:
        with pytest.raises(dist.DistNetworkError) as failed:
            client(server, timeout_s=10 * PATIENT_S).get("late")
        failures.append(failed.value)

    connected.set("a", "b")
    waiting = [threading.Thread(target=wait, daemon=True) for _ in range(8)]
    closing = threading.Thread(target=server.close, daemon=True)
    threads = [*waiting[:4], closing, *waiting[4:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S)
        assert not thread.is_alive()
    assert len(failures) == len(waiting)


def test_a_server_that_hangs_costs_the_timeout_that_the_client_was_given() -> None:
    """Whoever has been stopped still has its connections, and the kernel accepts further ones."""
    with socket.create_server((HOST, 0)) as hung:
        address = StoreAddress(HOST, hung.getsockname()[1], KEY)
        with pytest.raises(dist.DistNetworkError, match=r"has not replied for 0\.05 s"):
            SharedStore(address, 0.05)


@pytest.mark.parametrize(
    ("call", "limit_s"),
    [
        (lambda store: store.check([]), PATIENT_S),
        (lambda store: store.add("n", 1), PATIENT_S),
        (lambda store: store.get("n"), PATIENT_S),
        (lambda store: store.wait(["n"], timedelta(seconds=7)), 7.0),
        (lambda store: store.wait(["n"], timedelta(seconds=500)), 500.0),
    ],
)
def test_no_call_waits_for_its_reply_longer_than_its_own_timeout(
    server: StoreServer, call: Callable[[SharedStore], object], limit_s: float
) -> None:
    store = client(server)
    store.set("n", "1")
    call(store)
    assert store._socket.gettimeout() == limit_s  # noqa: SLF001 -- the deadline of the call


def test_replies_that_wait_for_nothing_are_not_waited_for_as_long_as_ranks_are(
    server: StoreServer,
) -> None:
    store = client(server, 1800.0)
    assert store.add("n", 1) == 1
    assert store._socket.gettimeout() == 30.0  # noqa: SLF001 -- as above


def test_ranks_of_the_library_meet_at_it(server: StoreServer) -> None:
    sums = dict[int, float]()

    def rank(number: int, store: Store) -> None:
        device = ProcessGroupGloo.create_device(hostname=HOST)
        options = ProcessGroupGloo._Options()  # noqa: SLF001 -- there is no public name
        options._devices, options._timeout = [device], timedelta(seconds=PATIENT_S)  # noqa: SLF001
        group = ProcessGroupGloo(store, number, 3, options)
        tensor, how = torch.tensor([10.0**number]), AllreduceOptions()
        how.reduceOp = ReduceOp.SUM
        group.allreduce([tensor], how).wait()
        sums[number] = tensor.item()

    stores = [client(server) for _ in range(3)]
    work = (partial(rank, each, PrefixStore("world", store)) for each, store in enumerate(stores))
    ranks = [threading.Thread(target=each) for each in work]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENT_S)
    assert sums == dict.fromkeys(range(3), 111.0)


# --- for strangers -----------------------------------------------------------------------------------


def test_it_listens_at_the_address_it_is_given_and_no_other(server: StoreServer) -> None:
    assert server.host == HOST
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=PATIENT_S)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"\xff" * 64, bytes(64)])
def test_a_stranger_gets_no_answer_and_its_connection_is_closed(
    server: StoreServer, said: bytes
) -> None:
    client(server).set("secret", "of the run")
    with stranger(server) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    assert client(server).num_keys() == 1


def test_another_key_opens_nothing(server: StoreServer) -> None:
    with pytest.raises(dist.DistNetworkError, match="it closed the connection"):
        client(server, key=SharedKey.random()).set("mine", "now")
    assert client(server).num_keys() == 0


def test_a_client_does_not_believe_whoever_listens_in_the_servers_place() -> None:
    impostor = StoreServer(HOST, SharedKey.random())
    with pytest.raises(dist.DistNetworkError):
        client(impostor).get("address of rank 0")
    impostor.close()


def test_a_stranger_that_says_nothing_is_closed_after_a_while() -> None:
    server = StoreServer(HOST, KEY, stranger_s=0.05)
    store = client(server)
    with stranger(server) as connection:
        assert is_closed(connection)
    assert store.add("a", 1) == 1, "one that has the key may be silent as long as it likes"
    server.close()


def test_strangers_hold_a_bounded_number_of_connections_and_keep_no_client_out() -> None:
    server = StoreServer(HOST, KEY, most_strangers=3)
    strangers = [stranger(server) for _ in range(9)]
    assert all(map(is_closed, strangers[:6]))
    assert client(server).add("still", 1) == 1
    for each in strangers:
        each.close()
    server.close()


class HeldServer(StoreServer):
    """Accepts nobody until it is let go: whoever comes before comes at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        super().__init__(HOST, KEY)

    def _run(self) -> None:
        self.go.wait()
        super()._run()


def test_strangers_who_come_all_at_once_push_out_no_client_among_them() -> None:
    server = HeldServer()
    first = stranger(server)
    first.sendall(KEY.frame(msgspec.msgpack.encode(Count())))
    others = [stranger(server) for _ in range(200)]
    server.go.set()
    assert first.recv(1) != b"", "it is answered"
    assert all(map(is_closed, others[:-MOST_STRANGERS]))
    for each in (first, *others):
        each.close()
    server.close()


def test_strangers_push_no_client_out_however_many_come() -> None:
    server = StoreServer(HOST, KEY, most_strangers=1)
    store = client(server)
    assert store.add("calls", 1) == 1
    strangers = [stranger(server) for _ in range(4)]
    assert all(map(is_closed, strangers[:3]))
    assert store.add("calls", 1) == 2
    for each in strangers:
        each.close()
    server.close()
