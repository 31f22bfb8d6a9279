"""A dry run started from a program, and its journal read back: ``python examples/program.py RUN_DIR``.

A dry run uses a stub trainer and stub engines, and the same code for everything else.
"""

import sys
from collections import Counter
from pathlib import Path

import offbeat

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"


def main(run_dir: str) -> int:
    """Run, then count the events of the journal; return the exit code of the run."""
    exit_code = offbeat.run_recipe(RECIPE, ["wandb.mode=disabled"], run_dir=run_dir, dry_run=True)
    kinds = Counter(type(event).__name__ for event in offbeat.read_events(run_dir))
    print(f"{kinds['Admitted']} groups drawn, {kinds['StepApplied']} steps applied")
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
