"""``offbeat check``: checks this machine for a valid recipe."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import typer

from offbeat.config.engine_plugin import find_engine
from offbeat.config.hub_path import is_on_hub
from offbeat.config.loader import LoadedRecipe, resolve_run_dir
from offbeat.config.mixture import environment_views, environment_weights, key_in, text_in
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.doors import find_only
from offbeat.environments.environment_plugin import find_environment
from offbeat.environments.hub_files import HubFilesError
from offbeat.environments.inputs import DATA
from offbeat.environments.media_prompts import find_media
from offbeat.environments.prompt_files import FilePrompts
from offbeat.launch.checks.algorithm import (
    check_algorithm,
    check_checkpoints,
    check_failed_samples,
    check_kl,
    check_microbatches,
    check_optimizer_steps,
    check_teacher,
)
from offbeat.launch.checks.files import (
    check_not_a_uri,
    check_overlap,
    check_prompts,
    check_run_dir,
    list_fetched_commits,
)
from offbeat.launch.checks.gpu_memory import gpu_bytes
from offbeat.launch.checks.machine import (
    check_cores,
    check_memory,
    check_one_gpu,
    check_shared_memory,
    this_machine,
)
from offbeat.launch.checks.model_files import ModelFiles, check_lengths, check_weights, read_model
from offbeat.launch.checks.prompt_lengths import check_prompt_lengths
from offbeat.launch.checks.software import (
    check_gpus,
    check_one_process,
    check_packages,
    check_ray_address,
    check_trackers,
    count_gpus,
)
from offbeat.launch.checks.user_code import (
    check_advantage,
    check_loss,
    check_sampler,
    check_secrets,
    check_targets,
    check_variables,
    try_options,
)
from offbeat.launch.hub_model import with_local_model
from offbeat.messages.delayed_interrupt import delay_interrupt
from offbeat.messages.exit_codes import REFUSED
from offbeat.messages.failures import DeadlineExceeded, FixableError
from offbeat.messages.finding import Finding, Level, error, ok
from offbeat.messages.missing_package import PackageMissing, name_missing_package
from offbeat.messages.text import printable_lines
from offbeat.telemetry.logs import pause_collections
from offbeat.trainers.trainer_plugin import find_parts, find_trainer
from offbeat.weight_sync.delta_plugin import find_delta
from offbeat.weight_sync.transport_plugin import find_transport_plugin

_ORDER = (Level.ERROR, Level.WARNING, Level.OK)
_COLOURS = {
    Level.OK: typer.colors.GREEN,
    Level.WARNING: typer.colors.YELLOW,
    Level.ERROR: typer.colors.RED,
}


def check_machine(loaded: LoadedRecipe, run_dir: Path | None, versions: str) -> int:
    """Report all findings, then ``versions``. Return 0, or 1 if something cannot work."""
    config, of_hub = loaded.config, list[Finding]()
    try:
        config = with_local_model(config, partial(typer.echo, err=True))
    except FixableError as missing:
        of_hub = [error("model", f"{missing.subject}: {missing.problem}", f"{missing.fix}.")]
    except DeadlineExceeded as late:
        of_hub = [error("model", str(late), "Download the model first, with offbeat stage.")]
    unused = [
        ok("recipe", f"not used, another choice by name was made: {key}") for key in loaded.dropped
    ]
    found = [*of_hub, *find(config, run_dir)]
    refused = {each.subject for each in found if each.level is Level.ERROR}
    found += try_options(config, Path.cwd(), refused)
    if has_model(config) and not any(each.level is Level.ERROR for each in found):
        from offbeat.launch.checks.model_proof import check_activations

        found += check_activations(config, this_machine())
    findings = [ok("recipe", str(loaded.recipe)), *unused, *found]
    print_findings(findings, versions)
    return REFUSED if any(finding.level is Level.ERROR for finding in findings) else 0


def print_findings(findings: Sequence[Finding], versions: str) -> None:
    """Print findings, errors first, then ``versions``. The last line counts and names problems."""
    for finding in sorted(findings, key=lambda each: _ORDER.index(each.level)):
        word, rest = printable_lines(str(finding)).split(" ", 1)
        typer.echo(f"{typer.style(word, fg=_COLOURS[finding.level])} {rest}")
    typer.echo(f"\n{versions}\n\n{summary(findings)}")


def find(
    config: RunConfig, run_dir: Path | None, commits: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yield all findings about running ``config`` on this machine, in ``run_dir`` if it is given.

    ``commits`` has the commit of each path on the hub. If it is None, commits are resolved.
    """
    if commits is None:
        try:
            commits = list_fetched_commits(config, {})
        except HubFilesError as missing:
            yield error("prompts", f"{missing.subject}: {missing.problem}", f"{missing.fix}.")
        except DeadlineExceeded as late:
            yield error("prompts", str(late), "Download the files first, with hf download.")
    for path, commit in (commits or {}).items():
        yield ok("prompts", f"{path} at commit {commit}")
    beside_model = find_beside_model(config, run_dir, commits, calls_rewards=True)
    yield from _until_package_is_missing("checks of the recipe and this machine", beside_model)
    yield from _until_package_is_missing("checks of the model", find_of_model(config, commits))


def _until_package_is_missing(name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings. If a check needs a missing package, report that the rest is skipped."""
    try:
        with name_missing_package():
            yield from findings
    except PackageMissing as missing:
        yield error("skipped", f"{name}, all or a part: {missing.problem}", f"{missing.fix}.")


def find_beside_model(
    config: RunConfig,
    run_dir: Path | None,
    commits: Mapping[str, str] | None,
    *,
    calls_rewards: bool = False,
) -> Iterator[Finding]:
    """Yield findings about everything except the model's class and tokenizer, without torch.

    With ``calls_rewards``, each reward of the user is called once, because the run will call it
    soon anyway.
    """
    model, about_model = read_model(Path(config.model.path))
    if is_on_hub(config.model.path):
        about_model = []  # the download has reported why it is missing
    machine = this_machine()
    engines = find_engine(config.generator.backend)
    is_local = config.runtime.backend == "local"
    yield from chain(
        check_packages(config),
        engines.check(config) if engines is not None else (),
        about_model,
        check_weights(config) if model else (),
        check_lengths(config, model) if model else (),
        _of_each_environment(config, commits, calls_rewards=calls_rewards),
        check_checkpoints(config),
        check_failed_samples(config),
        check_algorithm(config),
        check_kl(config),
        check_microbatches(config),
        check_optimizer_steps(config),
        check_sampler(config, Path.cwd()),
        check_loss(config, Path.cwd()),
        check_advantage(config, Path.cwd()),
        check_secrets(config),
        check_cores(config, machine),
        check_shared_memory(config, machine, model) if model and not is_local else (),
        check_gpus(config, count_gpus(config)),
        check_weight_sync(config, os.environ),
        check_not_a_uri(run_dir),
        _check_run_dir(config, run_dir, model),
        check_trackers(config, os.environ),
        check_one_process(os.environ) if is_local else check_ray_address(os.environ),
    )


def check_weight_sync(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of the delta and transport plug-ins about a recipe on this machine."""
    if config.sync.delta and config.generator.has_engines:
        yield from find_delta().check(config)
    transport = find_transport_plugin(config.sync)
    if transport is not None:
        yield from transport.check(config, environ)


def find_of_model(config: RunConfig, commits: Mapping[str, str] | None) -> Iterator[Finding]:
    """Yield findings about the model, and about prompts as tokens of the model."""
    model, _ = read_model(Path(config.model.path))
    engines = find_engine(config.generator.backend)
    trained, of_model, gpu = None, chain[Finding](), gpu_bytes(config)
    if model and has_model(config):
        with delay_interrupt(), pause_collections():
            from offbeat.launch.checks import torch_ranks  # isort: skip -- names torch if it lacks
            from offbeat.launch.checks import model_proof
        trained = model_proof.count_trained_parameters(config)
        plugin = find_trainer(config.trainer.backend)
        of_model = chain(
            model_proof.check_end_tokens(config),
            model_proof.check_model_proof(config),
            () if plugin is None else plugin.check(config, gpu),
            torch_ranks.check_data_ranks(config, gpu),
            *(part.check(config, gpu) for part in find_parts(config)),
        )
    yield from chain(
        of_model,
        engines.check_model(config) if model and engines is not None else (),
        check_teacher(config) if model else (),
        check_memory(config, this_machine(), model, trained) if model else (),
        check_one_gpu(config, model, gpu, trained) if model else (),
    )
    if model:
        yield from _tokens_of_each_environment(config, commits)


def _check_run_dir(
    config: RunConfig, run_dir: Path | None, model: ModelFiles | None
) -> Iterator[Finding]:
    checkpoint = config.checkpoint
    yield from check_run_dir(
        run_dir.absolute() if run_dir is not None else resolve_run_dir(config),
        model,
        requested=run_dir is not None,
        # The newest state is written next to the states that are kept.
        checkpoints=checkpoint.keep + 1 if 0 < checkpoint.interval <= config.steps else 0,
        dtype=config.model.dtype,
        adapter_parameters=_adapter_parameters(config) if model else None,
    )


def _adapter_parameters(config: RunConfig) -> int | None:
    """Return the number of parameters of trained adapters, or None without adapters."""
    if not model_is_frozen(config) or not has_model(config):
        return None
    from offbeat.launch.checks import model_proof

    return model_proof.count_trained_parameters(config)


def has_model(config: RunConfig) -> bool:
    """Return whether a run loads a model. If so, its checks load torch, which takes seconds."""
    return config.trainer.backend != "stub" or config.generator.backend != "stub"


def _of_each_environment(
    config: RunConfig, commits: Mapping[str, str] | None, *, calls_rewards: bool
) -> Iterator[Finding]:
    """Yield findings about prompts and code of each environment, named if there are several."""
    weights = environment_weights(config)
    trained, held = dict[str, FilePrompts](), dict[str, FilePrompts]()
    for name, view in environment_views(config).items():
        plugin, read = find_environment(view.environment.name), dict[str, FilePrompts]()
        found = list[Finding]()
        share = weights[name] / sum(weights.values()) if name else 1.0
        if commits is not None:
            found = list(check_prompts(view, commits, share=share, read=read))
        row = _first_row(read) if calls_rewards else None
        for finding in chain(
            found,
            check_targets(view, Path.cwd(), row),
            () if plugin is None else plugin.check(view),
            check_variables(view),
        ):
            yield _of_environment(name, finding) if name else finding
        for key, prompts in read.items():
            (trained if key == DATA else held)[key_in(name, key)] = prompts
    yield from check_overlap(config, trained, held)


def _first_row(read: Mapping[str, FilePrompts]) -> dict[str, Any] | None:
    """Return the first row that a run draws, as a reward receives it, or None without a file."""
    prompt = read[DATA].prompt(0) if DATA in read else None
    return None if prompt is None else find_media().without_content(prompt.data)


class AgentChecks(Protocol):
    """Checks of an environment whose episodes call the model over HTTP."""

    def check_agent(self, config: RunConfig) -> Iterator[Finding]:
        """Check how turns of a conversation are joined, and how many episodes run at once."""
        ...


def agent_checks() -> AgentChecks:
    """Return the checks of the plug-in.

    Raises:
        PluginUnusable: The plug-in's folder is missing, or its import fails.
    """
    return cast("AgentChecks", find_only("agents"))


def _tokens_of_each_environment(
    config: RunConfig, commits: Mapping[str, str] | None
) -> Iterator[Finding]:
    """Yield findings about prompts as the model reads them, with names if there are several."""
    for name, view in environment_views(config).items():
        plugin = find_environment(view.environment.name)
        for finding in chain(
            check_prompt_lengths(view, commits) if commits is not None else (),
            find_media().check_media(view, commits) if commits is not None else (),
            agent_checks().check_agent(view) if view.environment.is_agent else (),
            () if plugin is None or commits is None else plugin.check_slowly(view, Path.cwd()),
        ):
            yield _of_environment(name, finding) if name else finding


def _of_environment(name: str, finding: Finding) -> Finding:
    return replace(
        finding,
        subject=f"{finding.subject} of {name}",
        message=text_in(name, finding.message),
        fix=text_in(name, finding.fix),
    )


def problems_before_start(
    config: RunConfig, run_dir: Path | None, commits: Mapping[str, str], *, dry_run: bool
) -> list[Finding]:
    """Return the errors that ``offbeat check`` finds quickly, before anything is started.

    A run that joins a cluster is not checked against this machine. A dry run is not checked.
    """
    if _joins_cluster(config):
        recipe = () if dry_run else check_secrets(config)
        return _errors((*check_ray_address(os.environ), *recipe))
    return [] if dry_run else _errors(find_beside_model(config, run_dir, commits))


def problems_of_model(
    config: RunConfig, commits: Mapping[str, str], *, dry_run: bool
) -> list[Finding]:
    """Return the other errors of ``offbeat check``. Finding them takes seconds: it loads torch."""
    if dry_run or _joins_cluster(config):
        return []
    return _errors(find_of_model(config, commits))


def _joins_cluster(config: RunConfig) -> bool:
    return bool(os.environ.get("RAY_ADDRESS")) and config.runtime.backend == "ray"


def _errors(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.level is Level.ERROR]


def summary(findings: Sequence[Finding]) -> str:
    """Count and name problems, as in ``2 errors (data, prompts), 1 warning (cores)``."""
    subjects = {
        level: [finding.subject for finding in findings if finding.level is level]
        for level in (Level.ERROR, Level.WARNING)
    }
    bad = [
        f"{len(named)} {level}{'s' if len(named) > 1 else ''} ({', '.join(dict.fromkeys(named))})"
        for level, named in subjects.items()
        if named
    ]
    return ", ".join(bad) or "Everything is in order."
