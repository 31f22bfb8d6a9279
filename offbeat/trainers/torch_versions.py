"""Refuses versions of torch that cannot train on several ranks. It does not import torch."""

from typing import Final

from offbeat.messages.versions import read_minor

_SHARDS_FROM: Final = (2, 13)
"""First torch whose FSDP2 reduces gradients of unused weights and resets after a failed pass."""


def refuse_sharding(version: str) -> tuple[str, str] | None:
    """Return problem and fix if this torch cannot shard a model over ranks, else None."""
    minor = read_minor(version)
    if minor is None or minor >= _SHARDS_FROM:
        return None
    needed = ".".join(map(str, _SHARDS_FROM))
    problem = f"needs torch {needed} or newer on several ranks; this is torch {version}"
    return problem, f"Install torch {needed} or newer, or train on one rank"
