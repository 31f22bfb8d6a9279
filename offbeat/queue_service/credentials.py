"""Credentials of the process at the other end of a Unix socket."""

import os
import socket
import struct
from asyncio.trsock import TransportSocket
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


def is_ours(connection: socket.socket | TransportSocket) -> bool:
    """Return whether the peer process runs as this user, according to the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
