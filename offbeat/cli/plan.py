"""``offbeat plan``: reads the run, and prints the plan."""

from collections.abc import Sequence
from pathlib import Path

from offbeat.planning.run_plan import plan_run
from offbeat.runs.past_run import error_in_one_line


def plan_or_exit(
    run: Path,
    overrides: Sequence[str],
    length_scale: float,
    length_spread: float,
    *,
    cores: float | None,
    others: float | None,
    as_json: bool,
) -> str:
    """Return the plan as text or JSON; a run that cannot be planned: one line and exit code 2."""
    with error_in_one_line():
        plan = plan_run(
            run,
            overrides,
            length_scale=length_scale,
            length_spread=length_spread,
            cores=cores,
            others=others,
        )
    return plan.to_json() if as_json else plan.to_text()
