"""Default deadlines of the queue's clients, which both of them have. A caller may pass others."""

from typing import Final

ANSWER_S: Final = 10.0
"""For any answer, beyond the time that a call may wait."""

ROOM_S: Final = 60.0
"""For ``put`` to find room."""

LEASE_S: Final = 600.0
"""Until leased groups are given to others."""

SNAPSHOT_S: Final = 600.0
"""For a snapshot to be written."""

START_S: Final = 60.0
"""For a queue's actor to answer where it listens, a snapshot restored."""
