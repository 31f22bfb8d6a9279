"""Agreement of source ranks on the content of a release. Pure."""

from collections.abc import Callable, Mapping, Sequence

from offbeat.weight_sync.errors import ReplicasDiverged


def agreed_digests(
    by_rank: Sequence[Mapping[int, str]], names: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the digest of every bucket, on which all ranks that hold it agree.

    Args:
        by_rank: Digests of the buckets that each rank holds, by bucket.
        names: Returns the names of the tensors of a bucket, for the error.

    Raises:
        ReplicasDiverged: Two ranks hold the same weights with other values.
    """
    found = dict[int, tuple[int, str]]()
    for rank, digests in enumerate(by_rank):
        for bucket, digest in digests.items():
            first, known = found.setdefault(bucket, (rank, digest))
            if digest != known:
                raise ReplicasDiverged(names(bucket), (first, rank), (known, digest))
    return tuple(found[bucket][1] for bucket in range(len(found)))
