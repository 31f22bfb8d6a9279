"""Exit codes of the ``offbeat`` command; a signal's is 128 and its number."""

from typing import Final

FINISHED: Final = 0
FAILED: Final = 1

REFUSED: Final = 2
"""Nothing was done: the arguments, the recipe, or the run directory cannot be used."""
