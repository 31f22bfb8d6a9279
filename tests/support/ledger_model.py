"""What a test of the ledger compares: its whole state, a recount of its indices, and a receipt."""

from collections import Counter
from typing import Any

import msgspec

from offbeat.controller.group_moves import Place
from offbeat.controller.group_table import GroupRecord, GroupTable
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Receipt


def receipt(prompt_index: int, attempt: int, version: int = 0, tokens: int = 2) -> Receipt:
    """Two samples; the older one of ``version``, the other of the next."""
    return make_receipt(prompt_index, attempt, (((version, tokens),), ((version + 1, tokens),)))


def state_of(table: GroupTable) -> dict[str, Any]:
    """All public state by value, with the orders that are promised."""
    own = ("record", "changed", "events")  # of a ledger, not of the group table
    state = {name: value for name, value in vars(table).items() if name not in own}
    return {
        **msgspec.to_builtins(state),
        "arrival order": list(table.ready),
        "claim order": list(table.training),
        "orders within": [
            {key: list(groups) for key, groups in index.items()}
            for index in (table.ready_at, table.ready_for, table.in_flight_at)
        ],
        "outstanding": table.outstanding,
        "counts": table.counts(),
        "line": str(table),
    }


def recount(table: GroupTable) -> dict[str, Any]:
    """Every index, from nothing but each group's own fields."""
    groups = list(table.groups.values())
    ready = sorted(_at(groups, Place.READY), key=lambda group: group.arrival)
    in_flight = _at(groups, Place.IN_FLIGHT)
    waiting = _at(groups, Place.ADMITTED)
    return {
        "admitted": len(waiting),
        "in_flight": len(in_flight),
        "ready": [group.prompt_index for group in ready],
        "training": {group.prompt_index for group in _at(groups, Place.TRAINING)},
        "ready_tokens": sum(group.receipt.tokens for group in ready if group.receipt),
        "tokens": sum(group.tokens for group in groups),
        "outstanding": len(waiting) + len(in_flight) + len(ready),
        "versions": Counter(group.oldest_version for group in in_flight + ready),
        "outstanding_by_target_step": Counter(
            group.target_step for group in waiting + in_flight + ready
        ),
        "ready_at": _prompt_indices_by(ready, "oldest_version"),
        "ready_for": _prompt_indices_by(ready, "target_step"),
        "in_flight_at": {
            version: sorted(prompt_indices)
            for version, prompt_indices in _prompt_indices_by(in_flight, "oldest_version").items()
        },
    }


def indices(table: GroupTable) -> dict[str, Any]:
    """The same, as the group table keeps it."""
    return {
        "admitted": table.admitted,
        "in_flight": table.in_flight,
        "ready": list(table.ready),
        "training": set(table.training),
        "ready_tokens": table.ready_tokens,
        "tokens": table.ready_tokens + sum(group.tokens for group in table.training.values()),
        "outstanding": table.outstanding,
        "versions": table.versions,
        "outstanding_by_target_step": table.outstanding_by_target_step,
        "ready_at": {version: list(groups) for version, groups in table.ready_at.items()},
        "ready_for": {target_step: list(groups) for target_step, groups in table.ready_for.items()},
        "in_flight_at": {version: sorted(groups) for version, groups in table.in_flight_at.items()},
    }


def _at(groups: list[GroupRecord], place: Place) -> list[GroupRecord]:
    return [group for group in groups if group.place is place]


def _prompt_indices_by(groups: list[GroupRecord], field: str) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for group in groups:
        found.setdefault(getattr(group, field), []).append(group.prompt_index)
    return found
