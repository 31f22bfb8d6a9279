"""The simulator brings the command ``offbeat simulate``."""

from typing import Final

import typer

from offbeat.cli.arguments import RecipeCommand
from offbeat.plugins.simulation.commands import simulate

COMMANDS: Final = typer.Typer(rich_markup_mode=None)
COMMANDS.command(cls=RecipeCommand)(simulate)
