"""Client of the store through which torch's process groups exchange their addresses."""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
# torch exports Store without a declaration, and declares only a part of it, without types.

import contextlib
import socket
import threading
import weakref
from datetime import timedelta
from typing import Final

import msgspec
import torch.distributed as dist
from torch.distributed import Store

from offbeat.weight_sync.rendezvous.frames import (
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    ForeignFrame,
    FrameReader,
    Get,
    Set,
    StoreAddress,
    StoreReply,
    StoreRequest,
)

_LONGEST_REPLY_S: Final = 30.0
"""Maximum seconds for a reply if the request waits for no key, even if the timeout is longer."""
_SERVERS_SHARE: Final = 0.9
"""Share of the timeout after which the server reports a missing key, so that it replies in time."""
_decode_reply = msgspec.msgpack.Decoder(StoreReply).decode


class SharedStore(Store):
    """A ``torch.distributed.Store`` whose server serves only holders of its key.

    torch calls it from Python and from torch's own threads, which hold the interpreter's lock.
    torch keeps a reference only to the C++ half. So the creator of a process group must keep the
    store alive.
    """

    def __init__(self, address: StoreAddress, timeout_s: float) -> None:
        """Connect to the server.

        Args:
            address: Address of the server.
            timeout_s: Default timeout for a key to be set, for a connection, and for any reply. No
                call lasts longer than its timeout.

        Raises:
            torch.distributed.DistNetworkError: The server cannot be reached.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._address, self._lock = address, threading.Lock()
        self._frames = FrameReader(address.key)
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=timeout_s)
        except OSError as error:
            raise self._unreachable(error) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        weakref.finalize(self, self._socket.close)
        self.check([])  # unauthenticated connections are closed soon

    def clone(self) -> "SharedStore":
        """Return another client of the same store, with a separate connection."""
        return SharedStore(self._address, self.timeout.total_seconds())

    def close(self) -> None:
        """Close the connection. If another thread waits in a call, this call raises."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # only closing would wake no thread
        self._socket.close()

    # --- under the names that Python code calls --------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Set([key], [_encode(value)]))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask(Add(key, amount)).number

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(Check(keys)).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._values(keys, self.timeout if timeout is None else timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = CompareSet(key, _encode(expected), _encode(desired))
        return self._ask(request).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Append(key, _encode(value)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._values(keys, self.timeout)

    def multi_set(self, keys: list[str], values: list[str] | list[bytes]) -> None:
        self._ask(Set(keys, [_encode(each) for each in values]))

    def has_extended_api(self) -> bool:
        return True

    # --- under the names that torch's C++ looks for ----------------------------------------------

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return bool(self._ask(Delete(key)).number)

    def getNumKeys(self) -> int:  # noqa: N802
        return self._ask(Count()).number

    # --- the connection --------------------------------------------------------------------------

    def _values(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        """Wait until all keys are set and return their values.

        Raises:
            torch.distributed.DistStoreError: A key was not set in time.
        """
        timeout_s = timeout.total_seconds()
        reply = self._ask(Get(keys, _SERVERS_SHARE * timeout_s), timeout_s)
        if reply.is_late:
            named = ", ".join(keys[:3])
            raise dist.DistStoreError(f"not there after {timeout_s:g} s: {named}")
        return reply.values

    def _ask(self, request: StoreRequest, timeout_s: float = 0.0) -> StoreReply:
        """Send one request and return the reply. ``timeout_s`` is 0 if it waits for no key.

        Raises:
            torch.distributed.DistNetworkError: The server has ended, was replaced, or hangs.
        """
        message = self._address.key.frame(msgspec.msgpack.encode(request))
        if not timeout_s:
            timeout_s = min(self.timeout.total_seconds(), _LONGEST_REPLY_S)
        with self._lock:
            try:
                self._socket.settimeout(timeout_s)
                self._socket.sendall(message)
                while (body := self._frames.next()) is None:
                    data = self._socket.recv(1 << 16)
                    if not data:
                        raise ConnectionError("it closed the connection")
                    self._frames.feed(data)
            except TimeoutError as error:
                self._socket.close()  # a late reply must not be read as the next request's reply
                hangs = TimeoutError(f"it has not replied for {timeout_s:g} s")
                raise self._unreachable(hangs) from error
            except (OSError, ForeignFrame) as error:
                self._socket.close()
                raise self._unreachable(error) from error
        return _decode_reply(body)

    def _unreachable(self, error: Exception) -> Exception:
        where = f"{self._address.host}:{self._address.port}"
        return dist.DistNetworkError(f"the store at {where} cannot be reached: {error}")


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
