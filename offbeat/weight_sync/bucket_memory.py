"""Bytes of a bucket in any memory. Loads no torch."""

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from offbeat.weight_sync.manifest import Bytes

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory


def on_host(data: "BucketMemory") -> Bytes:
    """Return the bytes in main memory, without a copy if they are there already."""
    return data if isinstance(data, np.ndarray) else data.cpu().numpy()


def digest_of(data: "BucketMemory") -> str:
    """Return the digest of the bytes."""
    return xxhash.xxh3_128_hexdigest(on_host(data).data)
