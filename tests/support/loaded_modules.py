"""The heavy modules that a command has loaded."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "transformers", "numpy", "tensordict", "wandb", "pandas")


def modules_loaded_by(*args: str) -> tuple[int, list[str]]:
    """Exit code of a command, and the heavy modules its process had loaded at the end."""
    program = (
        "import sys\n"
        f"sys.argv = ['offbeat', *{args!r}]\n"
        "from offbeat.launch.commands.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print('LOADED', code, *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    _, code, *loaded = done.stdout.splitlines()[-1].split()
    return int(code), loaded
