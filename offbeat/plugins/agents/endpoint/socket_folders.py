"""Folders of endpoints' Unix sockets, which outlive a worker that is killed.

Every endpoint that starts removes those of dead ones: a socket that nobody listens on refuses a
connection. A socket gets its name only once its endpoint listens.
"""

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Final

SOCKET: Final = "endpoint.sock"
UNNAMED: Final = "starting.sock"
"""Name of the socket of an endpoint that does not listen yet."""

_PREFIX: Final = "offbeat-endpoint-"


def new_socket_folder() -> Path:
    """Create a folder for its owner alone."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def remove_abandoned_sockets() -> None:
    """Remove this user's folders of endpoints whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_abandoned(folder / SOCKET):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0)  # a busy endpoint is there
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # busy, of another user, gone, or not named yet
            return False
    return False
