"""Credentials of the process at the other end of a Unix socket."""

import os
import socket
import struct
from asyncio.trsock import TransportSocket
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


def is_ours(connection: socket.socket | TransportSocket) -> bool:
    """The process at the other end is of this user, by the kernel's word."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
