"""Arguments that several commands share, and the refusal of a setting written as an option."""

import difflib
import glob
import itertools
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from offbeat.messages.exit_codes import REFUSED
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable_lines

START: Final = "Start a run"
LOOK: Final = "Look at a run"
OPERATE: Final = "Operate"
PLAN: Final = "Plan and test"
GROUPS: Final = (START, LOOK, OPERATE, PLAN)
"""Headings of ``offbeat --help``, in order. Each command names one as its ``rich_help_panel``."""

_MOST_COMPLETIONS: Final = 100


def complete_recipe(incomplete: str) -> list[str]:
    """Return recipes that begin with a word of the command line, here or in ``recipes/``.

    If there are none, the shell completes other files.
    """
    return _matches(incomplete, "recipes/", "*.yaml")


def complete_run(incomplete: str) -> list[str]:
    """Return run directories, here or in ``runs/``, that begin with a word of the command line."""
    return [str(Path(each).parent) for each in _matches(incomplete, "runs/", "*/config.yaml")]


def _matches(incomplete: str, usual: str, pattern: str) -> list[str]:
    """Return some paths that begin with a word, either here or in the usual folder."""
    in_usual = usual if usual.startswith(incomplete) else usual + incomplete
    for prefix in (incomplete, in_usual):
        found = glob.iglob(glob.escape(os.path.expanduser(prefix)) + pattern)  # noqa: PTH111, PTH207 -- as typed
        if some := sorted(itertools.islice(found, _MOST_COMPLETIONS)):
            return some
    return []


RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="YAML recipe, as in recipes/quickstart.yaml.",
        autocompletion=complete_recipe,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings that override the recipe: steps=10 sampler.name=in_order.",
    ),
]

RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run.", autocompletion=complete_run),
]

_CLOSE: Final = 0.8


def refuse(problem: object, exit_code: int = REFUSED) -> NoReturn:
    """Print a problem on standard error and end the command."""
    typer.echo(printable_lines(str(problem)), err=True)
    raise typer.Exit(exit_code)


@contextmanager
def error_in_one_line() -> Generator[None, None, None]:
    """Exit with code 2 and one line if a run is unreadable."""
    try:
        yield
    except (OffbeatError, OSError) as error:
        refuse(f"offbeat: {error}")


class RecipeCommand(TyperCommand):
    """Command with recipe settings. Refuses a setting written as an option and shows its form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of typer's own click
        """Parse the arguments.

        Raises:
            typer.Exit: An argument looks like an option that this command does not have.
        """
        known = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        for at, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            if name == "--":
                break
            is_option = not name.startswith("--") or name in (*known, *ctx.help_option_names)
            if is_option or difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE):
                continue  # its parser names the nearest option for a misspelt one
            setting = _setting(name, value if equals else (*args[at + 1 :], "VALUE")[0])
            line = (
                f"No such option: {name}. Write settings of a recipe after it, without dashes: "
                f"{setting}. Options: {ctx.command_path} --help"
            )
            refuse(line)
        return super().parse_args(ctx, args)


def _setting(option: str, value: str) -> str:
    """Return an option as a setting. For a secret or an unknown key return only the form."""
    from offbeat.config import schema
    from offbeat.config.peer_keys import translate_keys
    from offbeat.config.secrets import is_secret_key

    key = option.removeprefix("--").replace("-", "_")
    if is_secret_key(key):
        return f"{key}=VALUE"
    is_key = schema.known(key) is not None or bool(translate_keys([key]))
    return f"{key}={value}" if is_key else "KEY=VALUE"
