"""Ray for one run: starts or joins a cluster and creates the actors.

Also chooses the folder for the sessions of a private Ray. Only its owner can enter this folder. Ray
makes its folders, with sockets and logs in them, writable for everybody. If other users could reach
them, they could replace Ray's socket with their own socket, or a log with a link.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import logging
import os
import stat
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
from ray._private import services
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue] -- compiled
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.actors.call import Handle
from offbeat.actors.controller_actor import ControllerActor
from offbeat.actors.environment_worker_actor import EnvironmentActor
from offbeat.actors.ray_run_files import RunFilesActor
from offbeat.actors.ray_worker import LIVENESS
from offbeat.config.engine_plugin import find_engine
from offbeat.config.limits import RankResources, trainer_resources
from offbeat.config.run import RunConfig
from offbeat.launch.bounded_call import run_bounded
from offbeat.launch.composition import Actors, build_run
from offbeat.launch.environment import pass_on_variables
from offbeat.launch.gcs_watch import JOINED_LIMIT_S, PRIVATE_LIMIT_S, GcsWatch
from offbeat.launch.process_environment import ENVIRONMENT
from offbeat.launch.ray_token import TokenRefused, has_token, keep_token_private
from offbeat.launch.run_parts import RunSpec, engine_specs, environment_specs, trainer_specs
from offbeat.messages.failures import DeadlineExceeded, FixableError, OffbeatError
from offbeat.messages.text import first_line
from offbeat.run_files.shared_directory import RunDirToken
from offbeat.run_files.sharing import Sharing
from offbeat.weight_sync.transport_plugin import find_transport_plugin

_BELOW: Final = "/ray/session_2026-11-24_02-05-24_431724_4194304/sockets/plasma_store"
_LONGEST_SOCKET: Final = 107
"""Maximum bytes of a Unix socket's path on Linux. Ray does not start with a longer path."""


def session_folder(environment: Mapping[str, str]) -> str | None:
    """Return the folder for the sessions of a private Ray, or None for Ray's default folder.

    The folder is ``ray`` in ``offbeat-UID`` in the folder for temporary files. Ray's default is
    used if ``RAY_TMPDIR`` is set, if paths would be too long, or if the folder cannot be made.
    """
    if "RAY_TMPDIR" in environment:
        return None
    folder = Path(environment.get("TMPDIR") or "/tmp", f"offbeat-{os.getuid()}")  # noqa: S108
    try:
        if not _is_private(folder):
            folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    except OSError:
        return None  # Ray's error for its own attempt names the fix
    if len(os.fsencode(folder)) + len(_BELOW) > _LONGEST_SOCKET:
        return None
    return str(folder / "ray")


def _is_private(folder: Path) -> bool:
    """Create the folder if missing. Return whether this user owns it and only they can enter."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return True


@contextmanager
def in_own_session() -> Generator[None, None, None]:
    """Start Ray's processes, within the block, outside of this process group.

    ``timeout``, ``kill -TERM -PGID`` and many schedulers signal the driver's process group. Ray's
    daemons block only SIGINT: a SIGTERM would end them and all actors before the run ends cleanly.

    This applies only on Linux, where the kernel ends the daemons when the driver dies. On other
    systems a process of Ray ends them, and finds them by the process group.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before = services.ConsolePopen
    services.ConsolePopen = partial(before, start_new_session=True)  # pyright: ignore[reportAttributeAccessIssue] -- Ray has no option
    try:
        yield
    finally:
        services.ConsolePopen = before


_NODES_S: Final = 2.0  # for a reply of the control service, which takes milliseconds
_FILE_CALLS: Final = 4  # concurrent calls from other machines; each needs a thread and 8 MiB


class NoRoom(OffbeatError):
    """An actor needs more than any machine of the cluster has.

    Fix: lower the named key, or add a machine.
    """

    actor: str
    resource: str
    requested: float
    largest: float
    key: str

    def __str__(self) -> str:
        return (
            f"{self.actor} can never be scheduled: it asks for {self.requested:g} {self.resource}, but "
            f"the largest machine of the cluster has {self.largest:g}. Lower {self.key}, or add a machine"
        )


class RayNotStarted(FixableError):
    """The private cluster on this machine did not start.

    Fix: free cores, shorten ``RAY_TMPDIR``, or join a cluster with ``RAY_ADDRESS``.
    """

    form = "Ray did not start on {}: {}. {}, or join a cluster that runs: RAY_ADDRESS=..."


class ClusterUnreachable(FixableError):
    """No Ray cluster answers at ``RAY_ADDRESS``.

    Fix: start the cluster, or correct or unset ``RAY_ADDRESS``.
    """

    form = "RAY_ADDRESS={}: {}. {}"


class ClusterLost(OffbeatError):
    """The driver's machine has left the cluster. Only this machine can run a controller.

    Fix: start the cluster, then resume the run.
    """

    def __str__(self) -> str:
        return (
            "this machine is no longer part of the Ray cluster: its raylet was killed or crashed, or "
            "the network to it is cut. A resume continues from the run directory"
        )


def start_ray(runtime_env: Mapping[str, str]) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names, or start a private one on this machine.

    Actors of a joined cluster get the run's environment variables. Actors of a private cluster
    inherit this process's variables.

    Raises:
        RayNotStarted: The private cluster did not start.
        ClusterUnreachable: No cluster answers at that address.
        TokenRefused: The cluster requires a token that this process does not have.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    check_token(address)
    variables = {**ENVIRONMENT, **pass_on_variables(os.environ, runtime_env).plain}
    local = _settings_of_private() if address == "local" else {}
    try:
        with in_own_session():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                namespace="offbeat",
                runtime_env={"env_vars": variables} if address != "local" else None,
                **local,
            )
    except ConnectionError as error:
        fix = "Name a cluster that runs as HOST:6379, or unset RAY_ADDRESS to run only on this machine"
        raise ClusterUnreachable(address, first_line(error).rstrip("."), fix) from error
    except Exception as error:
        if not_started := why_not_started(error):
            raise not_started from error
        raise


def _settings_of_private() -> dict[str, Any]:
    keep_token_private(os.environ, Path.home())
    return {"include_dashboard": False, "_temp_dir": session_folder(os.environ)}


def check_token(address: str) -> None:
    """Raise if the cluster at HOST:PORT refuses this process. ``ray.init`` gives no reason.

    Raises:
        TokenRefused: The token is missing or wrong. The message says which of the two.
    """
    if address == "local":
        return
    there = has_token(os.environ, Path.home())
    if os.environ.get("RAY_AUTH_MODE") == "token" and not there:  # Ray would end the process
        raise TokenRefused(address, "RAY_AUTH_MODE=token is set, but there is no token here")
    if address == "auto" or "://" in address:
        return
    try:
        GcsClient(address=address)
    except AuthenticationError as error:
        problem = "the one here is different" if there else "there is none here"
        raise TokenRefused(address, problem) from error
    except (RayError, RuntimeError, ValueError):
        pass  # ray.init reports it


def why_not_started(error: Exception) -> RayNotStarted | None:
    """Explain an error of ``ray.init`` about this machine, or return None if it is clear."""
    detail = " ".join(str(error).split()).rstrip(".")
    # Ray has no special error class for a start that times out
    if type(error) is Exception:
        return RayNotStarted("this machine", detail, "Stop what keeps its cores busy")
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        places = "Set RAY_TMPDIR to a short path, and HOME to a directory, that can be written"
        return RayNotStarted("this machine", detail, places)
    return None


def watch_gcs() -> GcsWatch:
    """Watch the control service of the cluster that this process belongs to."""
    limit_s = JOINED_LIMIT_S if os.environ.get("RAY_ADDRESS") else PRIVATE_LIMIT_S
    return GcsWatch(ray.get_runtime_context().gcs_address, limit_s)


def check_room(spec: RunSpec) -> None:
    """Check that every actor fits on some machine.

    Raises:
        NoRoom: An actor fits on no machine. The message names actor, resource and key to change.
        MachinesApart: Engines may be on machines that the trainer's weights cannot reach.
    """
    machines = [node for node in ray.nodes() if node["Alive"]]
    nodes = [machine["Resources"] for machine in machines]
    with_gpu = [each["NodeManagerAddress"] for each in machines if each["Resources"].get("GPU")]
    if (transport := find_transport_plugin(spec.config.sync)) is not None:
        transport.check_machines(spec.config, with_gpu)
    ranks, generator = trainer_resources(spec.config), spec.config.generator
    largest_rank = (max(each.cpus for each in ranks), max(each.gpus for each in ranks))
    for section, (cpus, gpus) in (
        ("trainer", largest_rank),
        ("generator", (generator.cpus, generator.gpus)),
    ):
        for resource, requested, key in (("CPU", cpus, "cpus"), ("GPU", gpus, "gpus")):
            largest = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if requested > largest:
                raise NoRoom(section, resource, requested, largest, f"{section}.{key}")
    if not os.environ.get("RAY_ADDRESS"):
        check_total(spec.config, nodes)


def check_total(config: RunConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that all actors together fit on a cluster that does not grow.

    Raises:
        NoRoom: There is not enough of a resource. The message names it and the keys to change.
    """
    ranks, generator = trainer_resources(config), config.generator
    engines = generator.engines
    requested_by_resource = {
        "CPU": sum(each.cpus for each in ranks) + engines * generator.cpus,
        "GPU": sum(each.gpus for each in ranks) + engines * generator.gpus,
    }
    for resource, requested in requested_by_resource.items():
        there = sum(node.get(resource, 0.0) for node in nodes)
        if requested > there:
            actors = f"the run of {len(ranks)} trainer ranks and {engines} engines"
            key = f"{resource.lower()}s"
            raise NoRoom(actors, resource, requested, there, f"trainer.{key} or generator.{key}")


def check_alive() -> None:
    """Raise if a lost controller cannot be restarted on this machine.

    Raises:
        ClusterLost: This machine's raylet has ended.
    """
    here = _this_node()
    # The control service may have ended since the last check. Then this call would block forever
    try:
        nodes = run_bounded(ray.nodes, "the list of machines", _NODES_S)
    except DeadlineExceeded:
        return  # ``GcsWatch`` reports it
    if not any(node["NodeID"] == here and node["Alive"] for node in nodes):
        raise ClusterLost


def make_actors(spec: RunSpec) -> Actors:
    """Create all actors except the controller. They start in the background."""
    engines = dict(_make_engines(spec))
    ranks = [] if spec.evaluates_only else list(_make_ranks(spec))
    return Actors(ranks, engines, list(_make_workers(spec, tuple(engines))))


def _make_engines(spec: RunSpec) -> Iterator[tuple[str, Handle]]:
    """Create the engines by name."""
    generator = spec.config.generator
    if generator.backend == "none":
        return
    engine_cls = ray.remote(engine_class(generator.backend))
    for engine in engine_specs(spec):
        yield (
            engine.name,
            engine_cls.options(
                name=global_name(spec, engine.name),
                num_cpus=generator.cpus,
                num_gpus=generator.gpus,
                max_restarts=-1,
            ).remote(engine),
        )


def _make_ranks(spec: RunSpec) -> Iterator[Handle]:
    """Create the trainer's ranks."""
    rank_cls = ray.remote(trainer_class(spec.config.trainer.backend))
    for rank, resources in zip(trainer_specs(spec), trainer_resources(spec.config), strict=True):
        yield rank_cls.options(**rank_options(resources)).remote(rank)


def rank_options(resources: RankResources) -> dict[str, float]:
    """Return Ray's options for a trainer rank, which handles one call at a time, in order."""
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "max_restarts": -1,
        "max_concurrency": 1,
    }


def _make_workers(spec: RunSpec, engines: tuple[str, ...]) -> Iterator[Handle]:
    worker_cls = ray.remote(concurrency_groups={LIVENESS: 1})(EnvironmentActor)  # pyright: ignore[reportCallIssue] -- Ray declares no such option
    for worker in environment_specs(spec, {name: global_name(spec, name) for name in engines}):
        yield worker_cls.options(num_cpus=0, max_restarts=-1).remote(worker)


def global_name(spec: RunSpec, engine: str) -> str:
    """Return the name of an engine's actor, unique on a cluster with several runs.

    The name is also unique to this driver, because actors of a killed driver may still exist when
    its run is resumed.
    """
    return f"{spec.run_id}/{spec.driver}/{engine}"


def make_controller(spec: RunSpec, actors: Actors) -> Handle:
    """Create the controller's actor, whose method ``run`` builds and executes the run.

    It runs on the driver's machine, where the driver reads journal, metrics and summary.
    """
    controller = ray.remote(ControllerActor).options(
        num_cpus=0, max_restarts=0, scheduling_strategy=_here()
    )
    return controller.remote(partial(build_run, spec, actors))


def make_run_files(spec: RunSpec, sharing: Sharing) -> Handle:
    """Create the actor that writes into the run directory for other machines."""
    actor = ray.remote(RunFilesActor).options(
        name=sharing.files,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=_FILE_CALLS,
        scheduling_strategy=_here(),
    )
    return actor.remote(str(spec.run_dir), sharing.token)


def find_sharing(spec: RunSpec, token: RunDirToken) -> Sharing | None:
    """Return how actors check whether they see the run directory.

    Return None if there is only one machine.
    """
    if not os.environ.get("RAY_ADDRESS"):
        return None
    secrets = pass_on_variables(os.environ, spec.config.runtime.env).secret
    return Sharing(token, _this_node(), global_name(spec, "run-files"), secrets)


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(_this_node(), soft=False)


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def engine_class(backend: str) -> type[Any]:
    """Return the actor class of ``generator.backend``. The backend must have engines.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    plugin = find_engine(backend)
    if plugin is not None:
        from offbeat.actors.engine_actor import make_actor_class

        return plugin.actor_class() or make_actor_class(plugin.server_class())
    if backend == "stub":
        from offbeat.actors.engine_actor import StubEngineActor

        return StubEngineActor
    from offbeat.actors.engine_actor import EmbeddedEngineActor

    return EmbeddedEngineActor


def trainer_class(backend: str) -> type[Any]:
    """Return the actor class of ``trainer.backend``."""
    from offbeat.actors import trainer_actor

    of_core = {"stub": trainer_actor.StubTrainerActor, "torch": trainer_actor.TorchTrainerActor}
    return of_core.get(backend, trainer_actor.PluginTrainerActor)
