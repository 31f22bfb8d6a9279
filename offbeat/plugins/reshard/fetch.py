"""State of one receiver's reshard: the rank to ask for each bucket, and retries. Pure.

    assigned --> asked of its sender --> arrived
                      |
                      +-- the sender failed --> assigned to another holder, or lost

Each receiver decides without asking source ranks or other receivers, so the loss of a process does
not affect the others.
"""

from collections.abc import Sequence

from offbeat.weight_sync.buckets import BucketRoute, find_needed


class BucketFetch:
    """State of one receiver's transfer. Not thread-safe."""

    def __init__(
        self,
        routes: Sequence[BucketRoute],
        nbytes: Sequence[int],
        receiver: int = 0,
        *,
        first: int = 0,
        needed: Sequence[int] | None = None,
    ) -> None:
        """Assign every bucket that ``receiver`` needs to its planned sender, or else to any holder.

        Args:
            routes: Holders and planned senders, by bucket.
            nbytes: Sizes of the buckets.
            receiver: Number of this receiver in the plan.
            first: Number that differs by engine, so that engines begin with different senders.
            needed: Buckets to fetch, or None for the plan's buckets of the receiver.
        """
        self._routes, self._nbytes, self._first = routes, nbytes, first
        self._waiting = dict[int, list[int]]()  # buckets by sender, not asked for yet
        self._asked = dict[int, list[int]]()  # buckets by sender, not arrived yet
        self.failed: dict[int, str] = {}  # reason by sender
        self._gone = set[int]()  # failed senders that no longer send this release
        self.lost: dict[int, str] = {}  # reason by bucket, if it has no holder left
        self.arrived = set[int]()
        self.dropped = 0  # buckets that arrived twice, or were not asked for
        self.resent = 0  # buckets that were requested from another holder
        buckets = find_needed(routes, receiver) if needed is None else needed
        for bucket in buckets:
            planned = dict(routes[bucket].sender_by_receiver).get(receiver)
            sender = min(routes[bucket].holders, key=self._load) if planned is None else planned
            self._waiting.setdefault(sender, []).append(bucket)

    @property
    def is_over(self) -> bool:
        """Return whether no bucket is left to ask for or to wait for."""
        return bool(self.lost) or not (self._waiting or self._asked)

    def next(self) -> tuple[int, tuple[int, ...]] | None:
        """Return an idle sender and the buckets to ask it for, or None if no sender is left."""
        free = sorted(self._waiting.keys() - self._asked.keys())
        if not free or self.lost:
            return None
        sender = free[self._first % len(free)]
        buckets = self._waiting.pop(sender)
        self._asked[sender] = list(buckets)
        return sender, tuple(buckets)

    def took(self, sender: int, bucket: int) -> bool:
        """Record a complete bucket. Return False if it is a duplicate or was not requested."""
        asked = self._asked.get(sender, [])
        if bucket not in asked or bucket in self.arrived:
            self.dropped += 1
            return False
        asked.remove(bucket)
        self.arrived.add(bucket)
        return True

    def ended(self, sender: int) -> None:
        """Record that a sender has sent all requested buckets."""
        if not self._asked.get(sender):
            self._asked.pop(sender, None)

    @property
    def is_release_gone(self) -> bool:
        """Return whether a bucket is lost because no holder sends this release any more."""
        return any(self._gone.issuperset(self._routes[bucket].holders) for bucket in self.lost)

    def fail(self, sender: int, why: str, *, gone: bool = False) -> None:
        """Record that a sender has failed, and assign its buckets to the other holders.

        ``gone``: whether it has ended, or sends a different release.
        """
        self.failed[sender] = why
        if gone:
            self._gone.add(sender)
        for bucket in [*self._asked.pop(sender, []), *self._waiting.pop(sender, [])]:
            left = [each for each in self._routes[bucket].holders if each not in self.failed]
            if left:
                self.resent += 1
                self._waiting.setdefault(min(left, key=self._load), []).append(bucket)
            else:
                self.lost[bucket] = why

    def _load(self, sender: int) -> tuple[int, int]:
        buckets = [*self._asked.get(sender, []), *self._waiting.get(sender, [])]
        return sum(self._nbytes[each] for each in buckets), sender
