"""Named moments at which a test may inject a fault. They have no effect in production."""

import enum
from collections.abc import Callable


class Failpoint(enum.StrEnum):
    """Points in the controller at which a fault can be injected."""

    ADMITTED = "admitted"  # a prompt is drawn, not yet dispatched
    DISPATCHED = "dispatched"  # in flight by the ledger, the call not yet sent
    ANSWERED = "answered"  # a receipt is here, not yet committed
    COMMITTED = "committed"
    CLAIMED = "claimed"  # a chunk is in training by the ledger, nothing sent
    CHUNK_SENT = "chunk_sent"
    INTENDED = "intended"  # the intent is appended, not yet durable
    INTENT_DURABLE = "intent_durable"  # finish is about to be sent
    FINISH_ANSWERED = "finish_answered"  # the trainer has stepped, the ledger does not know
    APPLIED = "applied"  # the ledger knows, not yet durable
    APPLIED_DURABLE = "applied_durable"  # payload still held
    CLEARED = "cleared"
    PUBLISHING = "publishing"  # the snapshot is requested
    PUBLISHED = "published"  # a release exists, no engine has it
    TRANSFERRING = "transferring"  # engines load it
    ACKED = "acked"  # the first engine serves it
    CHECKPOINTING = "checkpointing"
    CHECKPOINTED = "checkpointed"
    ABORTING = "aborting"  # a step failed on a living rank
    REWINDING = "rewinding"  # the trainer ranks are about to be replaced
    UNDOING = "undoing"  # a part of a rewind is in the ledger, the next one is not
    REWOUND = "rewound"  # the ledger is back, weights not yet served
    RECOVERED = "recovered"  # a new incarnation has sorted out its groups


Failpoints = Callable[[Failpoint], None]


def no_failpoints(point: Failpoint) -> None:
    """Do nothing (the production implementation)."""
