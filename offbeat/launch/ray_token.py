"""Handles the authentication token of a Ray cluster.

A local ``ray.init`` requires a token, and creates it in the home directory if it is missing. A head
node started later requires the same token. Anybody who has it can run code as this user.

This module does not load Ray, because a client reads its variables when it is imported.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from offbeat.messages.failures import OffbeatError


class TokenRefused(OffbeatError):
    """The cluster requires a token, and this process has none or a different one.

    Fix: set the cluster's token, as the message says.
    """

    address: str
    problem: str

    def __str__(self) -> str:
        return (
            f"RAY_ADDRESS={self.address}: the cluster asks for a token (InvalidAuthToken): {self.problem}. "
            "Put the ~/.ray/auth_token of the machine that ray start --head ran on into the same place "
            "here, or its content into RAY_AUTH_TOKEN; or start the head with RAY_AUTH_MODE=disabled"
        )


def has_token(environment: Mapping[str, str], home: Path) -> bool:
    """Return whether a client of Ray finds a token."""
    return _is_named(environment) or token_file(home).is_file()


def token_file(home: Path) -> Path:
    """Return where Ray keeps the token of a user."""
    return home / ".ray" / "auth_token"


def keep_token_private(environment: Mapping[str, str], home: Path) -> None:
    """Make the token of a private cluster readable only for its owner.

    Ray creates it with the permissions of any file, by default readable for everybody. If the
    permissions cannot be changed, nothing happens here, because Ray reports the problem with the
    home directory.
    """
    is_used = environment.get("RAY_AUTH_MODE", "token").lower() == "token"
    if _is_named(environment) or not is_used:
        return
    file = token_file(home)
    with contextlib.suppress(OSError):
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_private(file, secrets.token_hex(32))
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)


def _is_named(environment: Mapping[str, str]) -> bool:
    return "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment


def _create_private(file: Path, content: str) -> None:
    """Create a file atomically. If the file exists by then, keep it."""
    handle, beside = tempfile.mkstemp(prefix=".token.", dir=file.parent)  # its owner's only
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(content)
        os.link(beside, file)
    finally:
        Path(beside).unlink()


def client_environment(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables that Ray's client needs to send a token.

    A client that has a token sends it only in token mode. A cluster without tokens ignores the
    token.
    """
    return {"RAY_AUTH_MODE": "token"} if has_token(environment, home) else {}
