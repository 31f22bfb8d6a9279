"""One task's view of a partition: the groups it may claim, in order, and its waiters.

New groups are appended to a queue. Groups that come out of order (a lease that ended, columns
written late) go to a heap beside it; the older of the two heads is next. A group that leaves from
the middle stays as a stale entry without its bit, is skipped later, and is swept when stale entries
outnumber the others.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Final

from offbeat.queue_service.core.group import StoredGroup
from offbeat.queue_service.core.records import EVERYTHING, Where
from offbeat.queue_service.core.waits import Waiter, WaiterPool
from offbeat.queue_service.core.where import matches

_SLACK: Final = 64  # stale entries that are not worth a sweep


class Task:
    """A consumer task. For it, a group lacks columns, is available, leased or acked.

    ``available``, ``leased`` and ``acked`` count the groups in the partition.
    """

    def __init__(self, name: str, columns: tuple[str, ...], need: int, bit: int) -> None:
        self.name, self.columns, self.need, self.bit = name, columns, need, bit
        self.available = self.leased = self.acked = 0
        self.pools: dict[Where, WaiterPool] = {}
        self._line: deque[StoredGroup] = deque()
        self._newest = -1  # generation of the group queued last
        self._back: dict[int, StoredGroup] = {}
        self._order: list[int] = []  # heap of the generations in ``_back``

    # --- groups come and go ------------------------------------------------------------------

    def offer(self, group: StoredGroup) -> None:
        """Make the group available if it is new to this task and has all of its columns."""
        need, bit = self.need, self.bit
        if group.columns & need != need or (group.available | group.leased | group.acked) & bit:
            return
        if group.generation > self._newest:
            self._newest = group.generation
            self._line.append(group)
        else:
            self._stand_back(group)
        self._now_available(group)

    def give_back(self, group: StoredGroup) -> None:
        """Make a leased group available again, at its old place, unless it has left the queue."""
        if group.leased & self.bit:
            group.leased ^= self.bit
            self.leased -= 1
            self._stand_back(group)
            self._now_available(group)

    def done(self, group: StoredGroup) -> bool:
        """Mark a leased group as acked. Return False for one that has left the queue."""
        if not group.leased & self.bit:
            return False
        group.leased ^= self.bit
        group.acked |= self.bit
        self.leased -= 1
        self.acked += 1
        return True

    def take_as_acked(self, group: StoredGroup) -> None:
        """Add a group that this task had acked before the queue was restored."""
        group.acked |= self.bit
        self.acked += 1

    def forget(self, group: StoredGroup) -> None:
        """Remove a group that leaves the partition."""
        bit = self.bit
        if group.available & bit:
            self.available -= 1
            self._leave_pools(group)
            self._sweep()
        elif group.leased & bit:
            self.leased -= 1
        elif group.acked & bit:
            self.acked -= 1

    def _stand_back(self, group: StoredGroup) -> None:
        if group.generation not in self._back:
            self._back[group.generation] = group
            heapq.heappush(self._order, group.generation)

    def _now_available(self, group: StoredGroup) -> None:
        group.available |= self.bit
        self.available += 1
        for where, pool in self.pools.items():
            if where and matches(where, group.receipt.tags):
                pool.matches[group.generation] = group

    def _leave_pools(self, group: StoredGroup) -> None:
        for pool in self.pools.values():
            pool.matches.pop(group.generation, None)

    # --- claims ------------------------------------------------------------------------------

    def take(self, at_least: int, at_most: int, where: Where) -> list[StoredGroup] | None:
        """Lease the oldest groups that match, if there are enough; inspects each once."""
        if where:
            groups = self._matching(at_least, at_most, where)
        elif self.available >= at_least:
            groups = self._front(min(self.available, at_most))
        else:
            groups = None
        if groups is None:
            return None
        bit = self.bit
        for group in groups:
            group.available ^= bit
            group.leased |= bit
            if self.pools:
                self._leave_pools(group)
        self.available -= len(groups)
        self.leased += len(groups)
        if where:
            self._sweep()
        return groups

    def _front(self, count: int) -> list[StoredGroup]:
        found: list[StoredGroup] = []
        line, order, back, bit = self._line, self._order, self._back, self.bit
        while len(found) < count:
            if order and (not line or order[0] < line[0].generation):
                group = back.pop(heapq.heappop(order))
            else:
                group = line.popleft()
            if group.available & bit and (not found or found[-1] is not group):
                found.append(group)
        return found

    def _matching(self, at_least: int, at_most: int, where: Where) -> list[StoredGroup] | None:
        pool = self.pools.get(where)
        if pool is not None:  # a waiter has the same predicate, so the matches are known
            found = [pool.matches[i] for i in heapq.nsmallest(at_most, pool.matches)]
            return found if len(found) >= at_least else None
        found = list[StoredGroup]()
        for group in self._in_order():
            if matches(where, group.receipt.tags):
                found.append(group)
                if len(found) == at_most:
                    break
        return found if len(found) >= at_least else None

    def _in_order(self) -> Iterator[StoredGroup]:
        if self._order:
            self._line_up()
        return (group for group in self._line if group.available & self.bit)

    def _sweep(self) -> None:
        if len(self._line) + len(self._order) > 2 * self.available + _SLACK:
            self._line_up()

    def _line_up(self) -> None:
        live = {
            group.generation: group
            for group in chain(self._line, self._back.values())
            if group.available & self.bit
        }
        self._line = deque(live[generation] for generation in sorted(live))
        self._back, self._order = {}, []

    # --- waits -------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> None:
        """Add a waiter. The first one with a predicate inspects the available groups, once."""
        pool = self.pools.get(waiter.where)
        if pool is None:
            pool = self.pools[waiter.where] = WaiterPool()
            if waiter.where:
                for group in self._in_order():
                    if matches(waiter.where, group.receipt.tags):
                        pool.matches[group.generation] = group
        pool.join(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        pool = self.pools[waiter.where]
        pool.leave(waiter)
        if not pool.waiting:
            del self.pools[waiter.where]

    def servable(self) -> Waiter | None:
        """Return the waiting request to serve: the smallest per predicate; of equal ones the oldest."""
        best = None
        for where, pool in self.pools.items():
            count = self.available if where == EVERYTHING else len(pool.matches)
            waiter = pool.servable(count)
            if waiter is not None and (best is None or waiter.id < best.id):
                best = waiter
        return best

    @property
    def waiting(self) -> int:
        return sum(len(pool.waiting) for pool in self.pools.values())
