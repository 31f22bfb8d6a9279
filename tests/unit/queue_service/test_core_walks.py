"""Long random walks of QueueCore beside its model.

A machine's runs are short and often idle; these are long, and busy most of the time.
"""

from collections.abc import Callable
from random import Random

import pytest
from queue_model import COLUMNS, PREDICATES, TASKS
from test_core_moves import CONSUMERS, QueueMoves

WEIGHTS = {
    "put": 30, "add_columns": 15, "claim": 10, "wait": 10, "end_lease": 20, "let_go": 5,
    "time_passes": 4, "wait_to_put": 5, "cancel": 3, "drop_client": 1, "restart": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(27))
def test_on_long_walks_too_it_does_what_the_model_does(seed: int) -> None:
    rng, walker = Random(seed), QueueMoves()
    walker.start(CONSUMERS[seed % 3])
    for _ in range(300):
        walk_on(walker, rng)
        walker.whoever_can_be_served_was()
        walker.payloads_are_let_go_of_once_and_with_their_group()
        walker.the_numbers_are_those_of_the_groups()
        walker.a_receipt_leads_to_its_own_payloads_or_nowhere()


def walk_on(walker: QueueMoves, rng: Random) -> None:
    pick, nbytes, client = rng.randrange(10_000), rng.randrange(20), rng.choice("xy")
    columns = set(rng.sample(COLUMNS, rng.randint(1, 2)))
    least, most = sorted((rng.randint(1, 3), rng.randint(1, 3)))
    asked = (rng.choice(list(TASKS)), [least, most], rng.choice([(), *PREDICATES]), client, 5.0)
    latest = max(0, len(walker.receipts) - 1 - rng.randrange(5))
    lease = max(0, walker.model.last_lease - 1 - rng.randrange(5))
    name, step, rows = f"g-{rng.randrange(8)}", rng.choice([1, 1, 1, 1, 0, -1]), rng.randint(1, 3)
    score, permit, start = rng.randrange(4), rng.choice([None, pick]), rng.choice([None, 0, 1, 2])
    moves: dict[str, Callable[[], object]] = {
        "put": lambda: walker.put(name, step, rows, columns, nbytes, score, permit),
        "add_columns": lambda: walker.add_columns(latest, columns, nbytes, start),
        "claim": lambda: walker.claim(*asked),
        "wait": lambda: walker.wait(*asked),
        "end_lease": lambda: walker.end_lease(lease, rng.choice(["ack", "release", "renew"])),
        "let_go": lambda: walker.let_go([pick, pick + score], score == 0),
        "time_passes": lambda: walker.time_passes(rng.choice([0.5, 2.5])),
        "wait_to_put": lambda: walker.wait_to_put(2 * rows, nbytes, client),
        "cancel": lambda: walker.cancel(pick),
        "drop_client": lambda: walker.drop_client(client),
        "restart": walker.restart,
    }
    moves[rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]]()
