"""What QueueCore promises, said naively: lists searched to their end, nothing kept up to date."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from offbeat.queue_service.core import ColumnSpec, QueueLimits, Where

COLUMNS = ("a", "b", "c")
SPECS = {name: ColumnSpec(name, "float32") for name in COLUMNS}
TASKS = {"actor": ("a",), "critic": ("a", "b")}
PREDICATES: dict[Where, Callable[[list[int]], bool]] = {
    (): lambda _: True,
    (("score", ">", 1),): lambda scores: all(score > 1 for score in scores),
    (("score", "in", (0, 2)), ("score", "!=", 2)): lambda scores: set(scores) == {0},
}


@dataclass
class Held:
    name: str
    attempt: int
    rows: int
    nbytes: int
    scores: list[int]
    first: frozenset[str]
    generation: int
    cells: set[tuple[str, int]]
    payloads: list[str]
    # Task: lease, or acked
    at: dict[str, int | None] = field(default_factory=dict[str, int | None])

    def has(self, columns: tuple[str, ...]) -> bool:
        return all((name, row) in self.cells for name in columns for row in range(self.rows))


@dataclass
class Claim:
    id: int
    task: str
    client: str
    at_least: int
    at_most: int
    where: Where
    lease_s: float


@dataclass
class Loan:
    task: str
    client: str
    groups: list[Held]
    expires_at: float


@dataclass
class Ask:
    id: int
    rows: int
    nbytes: int
    client: str


class Model:
    """One partition; every question is answered by looking at everything."""

    def __init__(self, limits: QueueLimits, consumers: tuple[str, ...]) -> None:
        self.limits, self.consumers = limits, consumers
        self.groups: list[Held] = []  # in the order of their puts
        self.gone: dict[str, tuple[int, frozenset[str], bool]] = {}  # attempt, columns, lost
        self.tasks: list[str] = []
        self.loans: dict[int, Loan] = {}
        self.acked: set[int] = set()
        self.claims: list[Claim] = []
        self.asks: list[Ask] = []
        self.promises: dict[int, Ask] = {}
        self.generation = self.last_lease = self.last_waiter = 0
        self.served: dict[int, list[str] | tuple[int, int]] = {}
        self.freed: list[str] = []

    # --- questions ---------------------------------------------------------------------------

    def find(self, name: str) -> Held | None:
        return next((group for group in self.groups if group.name == name), None)

    def available(self, task: str, where: Where = ()) -> list[Held]:
        return [
            group
            for group in self.groups
            if group.has(TASKS[task]) and task not in group.at and PREDICATES[where](group.scores)
        ]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in (*self.groups, *self.promises.values()))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.groups, *self.promises.values()))

    def fits(self, rows: int, nbytes: int) -> bool:
        limits = self.limits
        return self.rows + rows <= limits.max_rows and self.nbytes + nbytes <= limits.max_bytes

    # --- moves -------------------------------------------------------------------------------

    def end_all(self, leases: list[int], now: float) -> None:
        """End these leases, then serve their tasks in the same order."""
        tasks = dict.fromkeys(self.loans[lease_id].task for lease_id in leases)
        for lease_id in leases:
            self.end(lease_id)
        self.settle(now, tasks)

    def settle(self, now: float, tasks: Iterable[str] | None = None) -> None:
        for task in self.tasks if tasks is None else tasks:
            while (claim := self.servable(task)) is not None:
                self.claims.remove(claim)
                groups = self.available(task, claim.where)[: claim.at_most]
                self.lend(task, groups, claim.client, now + claim.lease_s)
                self.served[claim.id] = [group.name for group in groups]

    def servable(self, task: str) -> Claim | None:
        firsts: list[Claim] = []
        for where in PREDICATES:
            asks = [each for each in self.claims if each.task == task and each.where == where]
            first = min(asks, key=lambda each: (each.at_least, each.id), default=None)
            if first is not None and len(self.available(task, where)) >= first.at_least:
                firsts.append(first)
        return min(firsts, key=lambda each: each.id, default=None)

    def let_in(self) -> None:
        while self.asks and self.fits(self.asks[0].rows, self.asks[0].nbytes):
            ask = self.asks.pop(0)
            self.promises[ask.id] = ask
            self.served[ask.id] = (ask.rows, ask.nbytes)

    def lend(self, task: str, groups: list[Held], client: str, expires_at: float) -> int:
        self.last_lease += 1
        for group in groups:
            group.at[task] = self.last_lease
        self.loans[self.last_lease] = Loan(task, client, groups, expires_at)
        return self.last_lease

    def lent(self, lease_id: int) -> list[Held]:
        loan = self.loans[lease_id]
        return [group for group in loan.groups if group in self.groups]

    def end(self, lease_id: int) -> None:
        for group in self.lent(lease_id):
            del group.at[self.loans[lease_id].task]
        del self.loans[lease_id]

    def ack(self, lease_id: int) -> None:
        groups = self.lent(lease_id)
        loan = self.loans.pop(lease_id)
        self.acked.add(lease_id)
        for group in groups:
            group.at[loan.task] = None
            done = {task for task, lease in group.at.items() if lease is None}
            if self.consumers and done.issuperset(self.consumers):
                self.remove(group)
        self.let_in()

    def remove(self, group: Held, *, lost: bool = False, replaced: bool = False) -> None:
        self.groups = [each for each in self.groups if each is not group]
        self.freed += group.payloads
        if not replaced:
            self.gone[group.name] = (group.attempt, group.first, lost)
