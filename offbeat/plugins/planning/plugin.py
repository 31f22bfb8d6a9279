"""``offbeat plan``, ``plan-sync`` and ``sweep``: predict and measure before a run."""

from pathlib import Path
from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import (
    PLAN,
    OverridesArgument,
    RecipeArgument,
    RecipeCommand,
    error_in_one_line,
    refuse,
)
from offbeat.messages.exit_codes import FAILED
from offbeat.messages.text import printable_json, printable_lines

COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command("plan-sync", cls=RecipeCommand, rich_help_panel=PLAN)
def plan_sync(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="YAML recipe for everything that no option sets."),
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Model directory or its config.json; no weights needed."),
    ] = None,
    senders: Annotated[
        str | None,
        typer.Option(
            "--senders",
            help="Trainer layout: tensor=8,pipeline=4,expert=16,expert_tensor=1,data=2.",
        ),
    ] = None,
    receivers: Annotated[
        str | None,
        typer.Option(
            "--receivers", help="Engine layout: tensor=8,data=4 are four engines of eight ranks."
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--recorded", help="Run with vLLM engines; use the regions that their loaders read."
        ),
    ] = None,
    per_machine: Annotated[
        int, typer.Option("--per-machine", min=1, help="Ranks per machine.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan which rank sends what to which engine. Needs no weights and no GPU."""
    from offbeat.plugins.planning.plan_sync import plan_or_exit

    typer.echo(
        plan_or_exit(
            recipe, overrides, model, senders, receivers, recorded, per_machine, as_json=as_json
        ),
        nl=False,
    )


@COMMANDS.command(cls=RecipeCommand, rich_help_panel=PLAN)
def plan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run with some steps.")],
    overrides: OverridesArgument = None,
    length_scale: Annotated[
        float, typer.Option("--length-scale", help="Factor for response lengths.")
    ] = 1.0,
    length_spread: Annotated[
        float,
        typer.Option("--length-spread", help="Factor for the spread of lengths; 0: all are equal."),
    ] = 1.0,
    cores: Annotated[
        float | None,
        typer.Option(
            "--cores", help="CPU cores for trainer, engines, workers and controller together."
        ),
    ] = None,
    others: Annotated[
        float | None,
        typer.Option(
            "--others", help="Other busy processes on these cores; default: as in the run."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a run's speed with different settings. Uses its measured times."""
    from offbeat.plugins.planning.run_plan import plan_run

    with error_in_one_line():
        planned = plan_run(
            run,
            overrides or [],
            length_scale=length_scale,
            length_spread=length_spread,
            cores=cores,
            others=others,
        )
    typer.echo(
        printable_json(planned.to_json()) if as_json else printable_lines(planned.to_text()),
        nl=False,
    )


@COMMANDS.command(cls=RecipeCommand, rich_help_panel=PLAN)
def sweep(  # noqa: PLR0917 -- the options of a command line
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="KEY=VALUE,VALUE to vary; several are combined."),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths", help="Length distribution: mean=300,sigma=0.8,clip=1024,prompt=64."
        ),
    ] = "",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps per setting.")] = 3,
    memory_mib: Annotated[
        int | None,
        typer.Option("--memory-mib", min=1, help="Memory limit of each rank in MiB, on Linux."),
    ] = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=1.0, help="Seconds per setting.")
    ] = 600.0,
    largest: Annotated[
        bool,
        typer.Option("--largest", help="Find the largest max_tokens_per_microbatch that fits."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Result file; an interrupted sweep continues from it."),
    ] = None,
) -> None:
    """Measure the trainer with several settings.

    It trains on made-up groups, without engines. Exit code 1: no setting could be measured.
    """
    from offbeat.launch.commands.recipes import read_with_model

    loaded = read_with_model(recipe, overrides)

    from offbeat.config.loader import resolve_run_dir
    from offbeat.plugins.planning.fabricated import LengthLaw, UnusableLengths
    from offbeat.plugins.planning.sweep import SweepRequest
    from offbeat.plugins.planning.sweep import sweep as swept
    from offbeat.plugins.planning.sweep_points import SweepPoint, UnusableSweep, table

    def say(point: SweepPoint) -> None:
        what = f"{point.step_s:.3g} s/step" if point.outcome == "ok" else point.outcome
        line = f"{' '.join(point.settings) or 'the recipe'}: {what}"
        typer.echo(printable_lines(line), err=True)

    try:
        request = SweepRequest(
            recipe,
            (*(overrides or ()), f"model.path={loaded.config.model.path}"),
            tuple(over or ()),
            LengthLaw.parse(lengths),
            steps,
            memory_mib,
            deadline_s,
            largest,
        )
        file = out or resolve_run_dir(loaded.config).with_suffix(".sweep.jsonl")
        points = swept(request, loaded, file, say)
    except (UnusableSweep, UnusableLengths) as error:
        refuse(error)
    typer.echo(printable_lines(f"\n{table(points)}\n{file}"))
    if all(point.outcome != "ok" for point in points):
        raise typer.Exit(FAILED)
