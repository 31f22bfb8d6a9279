"""Exit codes of the ``offbeat`` command. After a signal the code is 128 plus its number."""

from typing import Final

FINISHED: Final = 0
FAILED: Final = 1

REFUSED: Final = 2
"""Nothing was done, because the arguments, the recipe or the run directory cannot be used."""
