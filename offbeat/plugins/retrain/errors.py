"""Error of a run, or a setting, that cannot be retrained."""

from offbeat.messages.failures import FixableError


class CannotRetrain(FixableError):
    """A run lacks something that retraining needs, or a setting does not fit its record.

    Fix: Train with `transfer_queue.spool=keep`, or leave the named setting out.
    """


class RecordDamaged(FixableError):
    """The recorded columns of a group are not the bytes that its receipt names.

    Fix: Restore `RUN/spool` from a copy.
    """
