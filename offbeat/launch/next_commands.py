"""Commands that a user may give next, for the table at the end of the run."""

import shlex
from pathlib import Path

from offbeat.telemetry.summary import Summary


def next_commands(directory: Path, summary: Summary, *, on_stubs: bool) -> str:
    """Return commands on the run in ``directory``, each on a line with what it does.

    One that goes on with the run is among them where the run ended before its last step, unless it
    ran ``on_stubs``.
    """
    run = shlex.quote(str(directory))
    commands = {"one page": f"offbeat report {run}"}
    ended_early = summary.outcome != "finished" or summary.ended_by
    if ended_early and not on_stubs:
        commands["go on"] = f"offbeat train --resume {run}"
    return "\n".join(["next", *(f"{what:10} {command}" for what, command in commands.items())])
