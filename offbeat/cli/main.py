"""The commands. Each reads its recipe, then imports what it starts: nothing heavy is loaded before.

Exit codes: 0 finished, 1 failed run, 2 bad usage or configuration.
"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat import __version__

BAD_USAGE = 2

app = typer.Typer(
    name="offbeat",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="What a recipe may say, and what it comes to.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")

RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="YAML recipe, as in recipes/quickstart.yaml.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings laid over the recipe: steps=10 sampler.name=in_order.",
    ),
]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Where everything is written; wins over run_dir.")
]


def main() -> None:
    """The entry point of the ``offbeat`` command. Always ends in ``SystemExit``."""
    app(prog_name="offbeat")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def offbeat(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    run_dir: RunDirOption = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Run directory to go on from.")
    ] = None,
) -> None:
    """Train: one run on real actors."""
    if resume is not None:
        typer.echo(
            f"--resume {resume}: this version writes a journal but cannot resume from it yet. "
            "Leave --resume out to start a new run.",
            err=True,
        )
        raise typer.Exit(BAD_USAGE)
    _launch(recipe, overrides, run_dir, dry_run=False)


@app.command("dry-run")
def dry_run(
    recipe: RecipeArgument, overrides: OverridesArgument = None, run_dir: RunDirOption = None
) -> None:
    """Run the same code with a stub trainer and stub generators: no GPU, no model."""
    _launch(recipe, overrides, run_dir, dry_run=True)


def _launch(
    recipe: Path, overrides: list[str] | None, run_dir: Path | None, *, dry_run: bool
) -> None:
    from offbeat.cli.reading import read_or_exit

    loaded = read_or_exit(recipe, overrides, dry_run=dry_run)

    from offbeat.cli.launch import launch

    raise SystemExit(launch(loaded, run_dir=run_dir, dry_run=dry_run))


@app.command()
def check(
    recipe: RecipeArgument, overrides: OverridesArgument = None, run_dir: RunDirOption = None
) -> None:
    """Check a recipe, and this machine for it: every problem in one report."""
    from offbeat.cli.reading import read_or_exit

    loaded = read_or_exit(recipe, overrides)

    from offbeat.cli.check import check_machine

    raise SystemExit(check_machine(loaded, run_dir))


@app.command()
def submit(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    address: Annotated[
        str, typer.Option("--address", help="Address of the Ray dashboard.")
    ] = "http://127.0.0.1:8265",
    python: Annotated[
        str | None,
        typer.Option("--python", help="Absolute path of Python on the cluster; default: this one."),
    ] = None,
) -> None:
    """Pack the working directory and train on a Ray cluster."""
    from offbeat.cli.reading import read_or_exit

    loaded = read_or_exit(recipe, overrides)

    from offbeat.cli.submit import submit_job

    raise SystemExit(submit_job(loaded, overrides or [], address, python))


@config_app.command("explain")
def config_explain(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="Dotted key, as in sampler.max_staleness.")
    ] = "",
) -> None:
    """Type, range, default and meaning of a key, or of all keys of a section."""
    from offbeat.config.explain import NoSuchKey, explain

    try:
        typer.echo(explain(key))
    except NoSuchKey as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_USAGE) from error


@config_app.command("show")
def config_show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Only what was given, and where.")
    ] = False,
) -> None:
    """The recipe with overrides and defaults filled in."""
    from offbeat.cli.reading import read_or_exit, show

    typer.echo(show(read_or_exit(recipe, overrides), origins=origins), nl=False)
