"""Defines ``offbeat report``: one page on a run, or on several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import LOOK, complete_run, error_in_one_line


def write_page(run_dirs: Sequence[Path], output: Path | None) -> Path:
    """Write the page on these runs and return its path.

    ``output`` is by default next to the first run.
    """
    from offbeat.plugins.report.document import write_report  # slow to import

    return write_report(run_dirs, output).path


PAGE: Final = write_page
COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command(rich_help_panel=LOOK)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN2]...",
            help="Run directories; the first is shown in full.",
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file; default: report.html in the first run."),
    ] = None,
) -> None:
    """Write an offline HTML page about a run. It has outcome, timeline, curves and groups."""
    from offbeat.plugins.report.document import write_report

    with error_in_one_line():
        written = write_report(runs, output)
    typer.echo(f"{written.path}  {written.nbytes / 1e3:,.0f} kB")
