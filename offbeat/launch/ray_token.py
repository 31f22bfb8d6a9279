"""Authentication token of a Ray cluster.

Ray creates one for any local ``ray.init``, and a head started later requires it.

Loads no Ray: a client reads its variables when it is imported.
"""

from collections.abc import Mapping
from pathlib import Path

from offbeat.messages.failures import OffbeatError


class TokenRefused(OffbeatError):
    """The cluster requires a token, and this process has none, or another one."""

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
    named = "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment
    return named or (home / ".ray" / "auth_token").is_file()


def client_environment(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables that Ray's client needs to send a token.

    Even if it has a token, it sends one in token mode only. A cluster without tokens ignores it.
    """
    return {"RAY_AUTH_MODE": "token"} if has_token(environment, home) else {}
