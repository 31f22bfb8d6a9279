"""Times in seconds that several components share and that no recipe key sets.

``docs/supervision.md`` lists them, together with the times of single components.
"""

from typing import Final

RETRY_S: Final = 0.25
"""Seconds between two attempts to reach a process that is starting."""

ADVANTAGE_S: Final = 60.0
"""Maximum seconds for a user's advantage estimator on the groups of one chunk."""

READ_PROMPTS_S: Final = 3600.0
"""Maximum seconds to download and read the prompt files: enough for tens of gigabytes."""

READ_JOURNAL_S: Final = 900.0
"""Maximum seconds to read an earlier controller's journal: enough for ten million groups."""
