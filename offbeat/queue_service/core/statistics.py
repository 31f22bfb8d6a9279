"""Counters of stored groups and waiting clients."""

from collections import Counter
from collections.abc import Iterable, Mapping

from offbeat.queue_service.core.capacity import Capacity
from offbeat.queue_service.core.leases import Leases
from offbeat.queue_service.core.partition import Partition
from offbeat.queue_service.core.records import PartitionStats, Stats, TaskStats
from offbeat.queue_service.core.tasks import Task
from offbeat.queue_service.core.waits import Waiter


def stats_of(
    homes: Iterable[Partition],
    bounds: Capacity,
    claims: Mapping[int, Waiter],
    leases: Leases,
    now: float,
) -> Stats:
    """Return the statistics of all partitions.

    Linear in partitions, tasks and waiters, not groups.
    """
    known = {home.name: home for home in homes}
    stats_by_partition = {home.name: _partition(home, now) for home in known.values()}
    waits = Counter(request.reason for request in bounds.waiting.values())
    for waiter in claims.values():
        home = known[waiter.partition]
        waits[_reason(home, home.tasks[waiter.task], waiter)] += 1
    return Stats(
        groups=sum(each.groups for each in stats_by_partition.values()),
        rows=bounds.rows - bounds.promised_rows,
        nbytes=bounds.nbytes - bounds.promised_bytes,
        promised_rows=bounds.promised_rows,
        promised_bytes=bounds.promised_bytes,
        oldest_age_s=max((each.oldest_age_s for each in stats_by_partition.values()), default=0.0),
        leases=len(leases.by_id),
        lost=sum(each.lost for each in stats_by_partition.values()),
        waits=dict(waits),
        partitions=stats_by_partition,
    )


def _partition(home: Partition, now: float) -> PartitionStats:
    oldest = next(iter(home.groups.values()), None)  # groups are in the order of their puts
    return PartitionStats(
        groups=len(home.groups),
        rows=home.rows,
        nbytes=home.nbytes,
        oldest_age_s=0.0 if oldest is None else now - oldest.put_at,
        lost=home.lost,
        tasks={
            task.name: TaskStats(
                task.columns, task.available, task.leased, task.acked, task.waiting
            )
            for task in home.tasks.values()
        },
    )


def _reason(home: Partition, task: Task, waiter: Waiter) -> str:
    if waiter.where and task.available >= waiter.at_least:
        return "where"
    unread = len(home.groups) - task.leased - task.acked
    return "columns" if unread >= waiter.at_least else "groups"
