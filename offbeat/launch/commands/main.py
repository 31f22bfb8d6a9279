"""The commands. Each reads its recipe before it imports large packages.

Exit codes: 0 finished, 1 failed run, 2 bad usage or configuration.
"""

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from offbeat import __version__
from offbeat.doors import (
    NoSuchPlugin,
    PluginUnusable,
    find_plugin,
    find_plugins,
    find_problems,
    names_of_packages,
)
from offbeat.launch.bounded_call import exit_behind_blocked_calls
from offbeat.launch.commands.arguments import (
    GROUPS,
    OPERATE,
    START,
    OverridesArgument,
    RecipeArgument,
    RecipeCommand,
    complete_recipe,
    complete_run,
    refuse,
)
from offbeat.launch.commands.reading import reading_app
from offbeat.messages.exit_codes import FAILED, REFUSED
from offbeat.messages.missing_package import PackageMissing, missing_package
from offbeat.messages.text import printable_lines


class _Commands(TyperGroup):
    """The commands of this package, and the commands of plug-ins."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - of typer's own click
        """Write the commands under their headings, and the commands that other packages add."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        brought = names_of_packages("command")
        longest = max(map(len, [*commands, *brought]))
        width = formatter.width - 6 - longest
        rows = dict[str, list[tuple[str, str]]]()
        for name, command in commands.items():
            group = getattr(command, "rich_help_panel", None)
            group = group if isinstance(group, str) else _OTHER
            rows.setdefault(group, []).append(
                (f"{name:{longest}}", command.get_short_help_str(width))
            )
        for name, package in brought.items():
            rows.setdefault(_OTHER, []).append((f"{name:{longest}}", f"Of package {package}."))
        for group in (*GROUPS, _OTHER):
            if group in rows:
                with formatter.section(group):
                    formatter.write_dl(rows[group])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - of typer's own click
        """Return a command. If this package has none, search for a plug-in with its name."""
        found = super().get_command(ctx, cmd_name)
        is_folder = cmd_name in find_plugins("command")  # its commands have different names
        if found is not None or is_folder or cmd_name.startswith("-"):
            return found
        try:
            brought = find_plugin("command", cmd_name)
            if (
                brought.registered_commands
                or brought.registered_groups
                or brought.registered_callback
            ):
                return typer.main.get_command(brought)
            problem = "its entry point names a Typer that has no command"
            problems = [PluginUnusable(f"command {cmd_name}", problem, "Give it one")]
        except NoSuchPlugin:
            problems = find_problems()
        except PluginUnusable as unusable:
            problems = [unusable]
        for problem in problems:
            typer.echo(f"offbeat: {problem}", err=True)
        return None


_OTHER: Final = "Other commands"

app = typer.Typer(
    name="offbeat",
    cls=_Commands,
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(
    help="Explain recipe keys, and show a complete recipe.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(config_app, name="config", rich_help_panel=START)
app.add_typer(reading_app)
for commands in find_plugins("command").values():
    app.add_typer(commands)

RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Directory of the run; overrides run_dir.")
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="Run in this process, without Ray (runtime.backend=local).")
]


def main() -> None:
    """Run the ``offbeat`` command. Always ends in ``SystemExit``.

    Characters that standard output cannot encode are printed as ``?``. Standard error escapes them.
    """
    stdout: Any = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors == "strict":
        stdout.reconfigure(errors="replace")
    try:
        app([_from_home(each) for each in sys.argv[1:]], prog_name="offbeat")
    except (PackageMissing, ModuleNotFoundError) as error:
        missing = error if isinstance(error, PackageMissing) else missing_package(error)
        if missing is None:
            raise
        typer.echo(f"offbeat: {missing}", err=True)
        raise SystemExit(REFUSED) from None
    except SystemExit as end:
        exit_behind_blocked_calls(end.code if isinstance(end.code, int) else bool(end.code))
        raise


def _from_home(argument: str) -> str:
    """Expand a ``~`` that the shell does not expand: in quotes, or after the = of an option."""
    option, equals, value = (
        argument.partition("=") if argument.startswith("--") else ("", "", argument)
    )
    return f"{option}{equals}{os.path.expanduser(value)}" if value.startswith("~") else argument  # noqa: PTH111 - an unknown user stays as typed


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def offbeat(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command(cls=RecipeCommand, rich_help_panel=START)
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="YAML recipe; with --resume, the default is the run's config.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    run_dir: RunDirOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Directory of a run to continue, in place.",
            autocompletion=complete_run,
        ),
    ] = None,
    changed_code: Annotated[
        bool,
        typer.Option(
            "--changed-code",
            help="With --resume: accept changed code of reward, environment or sampler.",
        ),
    ] = False,
    local: LocalOption = False,
) -> None:
    """Train a model, on Ray actors or in this process."""
    if resume is not None and run_dir is not None:
        refuse(f"--resume {resume} and --run-dir {run_dir}: give one of them.")
    if resume is not None and recipe is not None and "=" in str(recipe) and not recipe.exists():
        recipe, overrides = None, [str(recipe), *(overrides or [])]  # an override, not a recipe
    if recipe is None:
        if resume is None:
            refuse("Name a RECIPE, as in: offbeat train recipes/quickstart.yaml")
        recipe = resume / "config.yaml"
        if not recipe.exists():
            refuse(f"{resume} has no run to resume: config.yaml is missing.")
    elsewhere = [each for each in overrides or () if each.partition("=")[0].strip() == "run_dir"]
    if resume is not None and elsewhere:
        refuse(
            f"--resume {resume} continues in that directory, but {elsewhere[-1]} names another. "
            "Leave run_dir out, or start a new run without --resume."
        )
    overrides = _with_local(overrides, local=local)
    _launch(recipe, overrides, run_dir, dry_run=False, resume=resume, changed_code=changed_code)


@app.command("dry-run", cls=RecipeCommand, rich_help_panel=START)
def dry_run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    run_dir: RunDirOption = None,
    local: LocalOption = False,
) -> None:
    """Try a recipe without a model or GPU. Runs at most ten steps with stub trainer and engines."""
    _launch(recipe, _with_local(overrides, local=local), run_dir, dry_run=True)


def _with_local(overrides: list[str] | None, *, local: bool) -> list[str]:
    """Return the overrides, with the runtime that ``--local`` selects.

    Exit with code 2 if the overrides also name a runtime, because one of the two would be ignored.
    """
    given = list(overrides or ())
    if not local:
        return given
    for each in given:
        key, _, value = (part.strip() for part in each.partition("="))
        if key in ("runtime", "runtime.backend") and value != "local":
            refuse(f"--local is runtime.backend=local, but {each} is given too: leave one out.")
    return [*given, "runtime.backend=local"]


def _launch(
    recipe: Path,
    overrides: list[str] | None,
    run_dir: Path | None,
    *,
    dry_run: bool,
    resume: Path | None = None,
    changed_code: bool = False,
) -> None:
    from offbeat.launch.commands.recipes import read_or_exit

    loaded = read_or_exit(recipe, overrides, dry_run=dry_run)

    from offbeat.launch.launch import launch

    raise SystemExit(
        launch(
            loaded, run_dir=run_dir, dry_run=dry_run, resume=resume, changed_code=changed_code
        ).code
    )


@app.command(cls=RecipeCommand, rich_help_panel=START)
def preview(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts to sample.")] = 16,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples per prompt.")] = 4,
    local: LocalOption = False,
) -> None:
    """Show prompts, answers and rewards before training. Prompts appear as the model reads them."""
    from offbeat.launch.commands.recipes import read_with_model
    from offbeat.launch.evaluate import NothingToEvaluate
    from offbeat.launch.preview import PreviewFailed, preview_recipe
    from offbeat.launch.run import RunRefused

    loaded = read_with_model(recipe, _with_local(overrides, local=local))
    try:
        shown = preview_recipe(loaded, prompts=prompts, samples=samples)
    except (NothingToEvaluate, RunRefused) as error:
        refuse(error)
    except PreviewFailed as error:
        typer.echo(printable_lines(str(error)), err=True)
        raise typer.Exit(FAILED) from None
    typer.echo(printable_lines(shown.to_text()), nl=False)


@app.command("eval", cls=RecipeCommand, rich_help_panel=START)
def evaluate(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|CHECKPOINT|RUN",
            help="YAML recipe, run directory, or checkpoints/step_N of a run.",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: OverridesArgument = None,
    run_dir: RunDirOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Use a stub engine: no GPU, no model.")
    ] = False,
    local: LocalOption = False,
) -> None:
    """Score a model on the sets of section eval. Exit code 1: it could not be scored."""
    from offbeat.launch.commands.recipes import read_or_exit
    from offbeat.launch.evaluate import NothingToEvaluate, check_can_evaluate, recipe_and_model

    try:
        recipe, model = recipe_and_model(what)
        loaded = read_or_exit(
            recipe, [*model, *_with_local(overrides, local=local)], dry_run=dry_run
        )
        if not dry_run:
            check_can_evaluate(loaded.config)
    except NothingToEvaluate as error:
        refuse(error)

    from offbeat.launch.launch import launch

    raise SystemExit(launch(loaded, run_dir=run_dir, dry_run=dry_run, evaluates_only=True).code)


@app.command(rich_help_panel=START)
def init(
    folder: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Created if missing.")] = ".",
    agent: Annotated[
        bool,
        typer.Option("--agent", help="Write an agent with a tool and tasks, instead of a reward."),
    ] = False,
    loss: Annotated[
        bool,
        typer.Option(
            "--loss", help="Also write a loss and its test; only these if a recipe exists."
        ),
    ] = False,
) -> None:
    """Create a directory that is ready to train.

    It has a recipe, a tested reward, prompts and a tiny model.
    """
    if agent and loss:
        refuse("--agent and --loss: give one of them. An agent's recipe can also have a loss.")

    from offbeat.launch.commands.starter import Starter, write_starter

    if not folder:  # as from an unset variable; it is not the working directory
        refuse('DIRECTORY is "". Name one, or leave it out: offbeat init')
    chosen = Starter.AGENT if agent else Starter.LOSS if loss else Starter.REWARD
    write_starter(Path(folder), chosen)


@app.command(cls=RecipeCommand, rich_help_panel=START)
def check(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="YAML recipe; if omitted, print only versions.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    run_dir: RunDirOption = None,
    local: LocalOption = False,
) -> None:
    """Check a recipe and this machine. Lists all problems, then versions for a bug report."""
    from offbeat.launch.commands.recipes import read_or_exit

    loaded = (
        read_or_exit(recipe, _with_local(overrides, local=local)) if recipe is not None else None
    )

    from offbeat.launch.checks.machine import versions
    from offbeat.launch.checks.report import check_machine
    from offbeat.launch.process_environment import ENVIRONMENT

    for name, value in ENVIRONMENT.items():  # as in a run: transformers reads them when imported
        os.environ.setdefault(name, value)

    if loaded is None:
        typer.echo(versions())
    else:
        raise SystemExit(check_machine(loaded, run_dir, versions()))


@app.command(cls=RecipeCommand, rich_help_panel=OPERATE)
def submit(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="YAML recipe; with --resume, leave it out.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Directory on the cluster of a run to continue, in place."),
    ] = None,
    address: Annotated[
        str, typer.Option("--address", help="Address of the Ray dashboard.")
    ] = "http://127.0.0.1:8265",
    python: Annotated[
        str | None,
        typer.Option(
            "--python", help="Absolute path of Python on the cluster; default: this Python."
        ),
    ] = None,
) -> None:
    """Upload the working directory and train on a Ray cluster.

    Exit code 1: the same job was submitted before, and failed or was stopped.
    """
    from offbeat.launch.submit import submit_job

    if resume is not None:
        if recipe is not None and "=" not in str(recipe):
            refuse(f"--resume {resume} continues with the run's recipe: leave {recipe} out.")
        given = [*([] if recipe is None else [str(recipe)]), *(overrides or [])]
        raise SystemExit(submit_job(resume, given, address, python))
    if recipe is None:
        refuse("Name a RECIPE, as in: offbeat submit recipes/quickstart.yaml")

    from offbeat.launch.commands.recipes import read_or_exit

    loaded = read_or_exit(recipe, overrides)
    raise SystemExit(submit_job(loaded, overrides or [], address, python))


@app.command(rich_help_panel=OPERATE)
def stage(
    model: Annotated[
        str,
        typer.Argument(metavar="OWNER/NAME[@REVISION]", help="Model of the Hugging Face Hub."),
    ],
    target: Annotated[Path, typer.Option("--to", help="Absolute path on each node's local disk.")],
    others: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
    stall_timeout_s: Annotated[
        float,
        typer.Option(
            "--stall-timeout",
            min=1.0,
            help="Seconds without a new byte before a download is killed and resumed.",
        ),
    ] = 120.0,
) -> None:
    """Download a model to this machine or to a cluster.

    With RAY_ADDRESS, the model is downloaded to every node of that cluster. Each file is checked against its checksum. Exit code 1: a node lacks the model.
    """
    from offbeat.launch.commands.stage import stage_or_exit

    removed = [*(others or []), *(["--part", part] if part else [])]
    stage_or_exit(model, removed, target, stall_timeout_s)


@app.command(rich_help_panel=OPERATE)
def control(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Directory of a live run.", autocompletion=complete_run),
    ],
    command: Annotated[
        str, typer.Argument(metavar="pause|resume|stop|abort", help="Command for the run.")
    ],
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait until the run accepts it.")
    ] = 15.0,
) -> None:
    """Pause, resume, stop or abort a live run.

    Exit code 1: the run did not accept the command, so it was withdrawn.
    """
    from offbeat.launch.control import COMMANDS, leave, was_taken
    from offbeat.runs.directory import RunDirUnusable

    if command not in COMMANDS:
        refuse(f"{command}: no such command. Use one of {', '.join(COMMANDS)}.")
    try:
        left = leave(run, COMMANDS[command])
    except RunDirUnusable as error:
        refuse(error)
    if not was_taken(left, within_s=wait_s):
        refuse(
            f"{run}: the run did not accept {command} within {wait_s:g} s, so the command is "
            f"withdrawn. Is the run alive? If not: offbeat train --resume {run}",
            FAILED,
        )
    typer.echo(f"{run}: {command}")


@config_app.command("explain")
def config_explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Dotted key, as in sampler.max_staleness.")
    ] = "",
) -> None:
    """Print type, range, default and meaning of a key, or of all keys of a section."""
    from offbeat.config.explain import NoSuchKey, explain

    try:
        typer.echo(explain(key))
    except NoSuchKey as error:
        refuse(error)


@config_app.command("show", cls=RecipeCommand)
def config_show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Show only given settings, and where each was given.")
    ] = False,
) -> None:
    """Print the recipe with all overrides and defaults filled in."""
    from offbeat.launch.commands.recipes import read_or_exit, show

    typer.echo(show(read_or_exit(recipe, overrides), origins=origins), nl=False)
