"""Default deadlines of the queue's clients, which both of them have. A caller may pass others."""

from typing import Final

ANSWER_S: Final = 10.0
"""Time for any answer, beyond the time that a call may wait."""

ROOM_S: Final = 60.0
"""Time that ``put`` waits for room."""

LEASE_S: Final = 600.0
"""Time until leased groups are given to others."""

SNAPSHOT_S: Final = 600.0
"""Time for a snapshot to be written."""

START_S: Final = 60.0
"""Time until a queue's actor answers with its address, including the restore of a snapshot."""
