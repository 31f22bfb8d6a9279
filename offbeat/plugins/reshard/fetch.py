"""State of one receiver's reshard: which rank it asks for which bucket, and which again. Pure.

    assigned --> asked of its sender --> arrived
                      |
                      +-- the sender failed --> assigned to another holder, or lost

One receiver decides for itself: no source rank and no other receiver takes part, so that whoever is
lost costs the others nothing.
"""

from collections.abc import Sequence

from offbeat.weight_sync.buckets import BucketRoute, needed_by


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
        """Assign every bucket that ``receiver`` needs to a sender, the planned one if there is one.

        Args:
            routes: Holders and planned senders, by bucket.
            nbytes: Sizes of the buckets.
            receiver: Number of this receiver in the plan.
            first: Engines with different ones begin with different senders.
            needed: The buckets; None: those that the plan has for the receiver.
        """
        self._routes, self._nbytes, self._first = routes, nbytes, first
        self._waiting = dict[int, list[int]]()  # buckets by sender, not asked for yet
        self._asked = dict[int, list[int]]()  # buckets by sender, not arrived yet
        self.failed: dict[int, str] = {}  # why, by sender
        self._gone = set[int]()  # failed ones that do not send this release any more
        self.lost: dict[int, str] = {}  # buckets that no holder is left for, and why
        self.arrived = set[int]()
        self.dropped = 0  # buckets that came twice, or were not asked for
        self.resent = 0  # buckets that another holder was asked for
        buckets = needed_by(routes, receiver) if needed is None else needed
        for bucket in buckets:
            planned = dict(routes[bucket].sender_by_receiver).get(receiver)
            sender = min(routes[bucket].holders, key=self._load) if planned is None else planned
            self._waiting.setdefault(sender, []).append(bucket)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left to ask for or to wait for."""
        return bool(self.lost) or not (self._waiting or self._asked)

    def next(self) -> tuple[int, tuple[int, ...]] | None:
        """Return a sender with the buckets to ask it for; None: none that is not asked already."""
        free = sorted(self._waiting.keys() - self._asked.keys())
        if not free or self.lost:
            return None
        sender = free[self._first % len(free)]
        buckets = self._waiting.pop(sender)
        self._asked[sender] = list(buckets)
        return sender, tuple(buckets)

    def took(self, sender: int, bucket: int) -> bool:
        """Record that a bucket arrived whole; False: drop it, it was not asked of this sender."""
        asked = self._asked.get(sender, [])
        if bucket not in asked or bucket in self.arrived:
            self.dropped += 1
            return False
        asked.remove(bucket)
        self.arrived.add(bucket)
        return True

    def ended(self, sender: int) -> None:
        """Record that a sender has sent what it was asked for."""
        if not self._asked.get(sender):
            self._asked.pop(sender, None)

    @property
    def is_release_gone(self) -> bool:
        """Return whether a bucket is lost because none of its holders sends this release any more."""
        return any(self._gone.issuperset(self._routes[bucket].holders) for bucket in self.lost)

    def fail(self, sender: int, why: str, *, gone: bool = False) -> None:
        """Record that a sender can send nothing more; its buckets go to the other holders.

        ``gone``: it has ended, or sends another release.
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
