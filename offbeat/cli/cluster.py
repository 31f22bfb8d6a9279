"""Ray for one run: start or join it, make the actors, take everything down again."""

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray

from offbeat.actors.controller_actor import ControllerActor
from offbeat.actors.environment_worker.actor import EnvironmentActor, EnvironmentSpec
from offbeat.actors.generators.engine_actor import EngineSpec
from offbeat.actors.handles import Handle
from offbeat.actors.trainers.spec import TrainerSpec
from offbeat.cli.backends import engine_class, trainer_class
from offbeat.cli.compose import Actors, RunSpec, build_run
from offbeat.cli.launch import ENVIRONMENT
from offbeat.config.limits import trainer_ranks
from offbeat.config.run import ModelConfig, RunConfig
from offbeat.messages.failures import OffbeatError


class NoRoom(OffbeatError):
    """An actor asks for more than any machine of the cluster has."""

    def __init__(self, actor: str, resource: str, asked: float, largest: float, key: str) -> None:
        super().__init__(actor, resource, asked, largest, key)
        self.actor, self.resource, self.asked = actor, resource, asked
        self.largest, self.key = largest, key

    def __str__(self) -> str:
        return (
            f"{self.actor} can never be scheduled: it asks for {self.asked:g} {self.resource}, the "
            f"largest machine of the cluster has {self.largest:g}. Lower {self.key}, or add a machine"
        )


class RayNotStarted(OffbeatError):
    """The private cluster on this machine did not come up."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"Ray did not start on this machine: {self.detail}. "
            "Stop what keeps its cores busy, or join a cluster that runs: RAY_ADDRESS=..."
        )


def start_ray() -> None:
    """Join the cluster that ``RAY_ADDRESS`` names, or start a private one on this machine.

    Raises:
        RayNotStarted: The private one did not come up.
        ConnectionError: There is no cluster at that address.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            namespace="offbeat",
            runtime_env={"env_vars": dict(ENVIRONMENT)} if address != "local" else None,
            **local,
        )
    except Exception as error:
        if type(error) is not Exception:
            raise  # a class of its own says what it is; a start that takes too long has none
        raise RayNotStarted(" ".join(str(error).split())) from error


def check_room(spec: RunSpec) -> None:
    """Every actor fits some machine.

    Raises:
        NoRoom: Naming the actor, the resource and the key to change.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for section in ("trainer", "generator"):
        config = spec.config.trainer if section == "trainer" else spec.config.generator
        for resource, asked, key in (("CPU", config.cpus, "cpus"), ("GPU", config.gpus, "gpus")):
            largest = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if asked > largest:
                raise NoRoom(section, resource, asked, largest, f"{section}.{key}")


def make_actors(spec: RunSpec) -> Actors:
    """All actors but the controller. Returns at once; they start in the background."""
    config, model_path = spec.config, spec.config.model.path
    engine_cls = ray.remote(engine_class(config.generator.backend))
    engines: dict[str, Handle] = {}
    for index in range(config.generator.engines):
        name = f"generator-{index}"
        engine = EngineSpec(
            name=name,
            model_path=model_path,
            model=_served_model(config),
            generator=config.generator,
            stub=config.stub,
            seed=config.seed + index,
            run_dir=str(spec.run_dir),
        )
        engines[name] = engine_cls.options(
            name=_global_name(spec, name),
            num_cpus=config.generator.cpus,
            num_gpus=config.generator.gpus,
            max_restarts=-1,
        ).remote(engine)
    return Actors(list(_make_ranks(spec)), engines, list(_make_workers(spec, tuple(engines))))


def _served_model(config: RunConfig) -> ModelConfig:
    """The model as engines hold it: in the type that its weights travel in."""
    wire = config.sync.wire_dtype
    return config.model.model_copy(update={"dtype": wire}) if wire else config.model


def _make_ranks(spec: RunSpec) -> Iterator[Handle]:
    """The trainer's; a stub stands in for all of them."""
    config = spec.config
    rank_cls = ray.remote(trainer_class(config.trainer.backend)).options(
        num_cpus=config.trainer.cpus, num_gpus=config.trainer.gpus, max_restarts=-1
    )
    ranks = 1 if config.trainer.backend == "stub" else trainer_ranks(config)
    for rank in range(ranks):
        made_from = TrainerSpec(config, config.model.path, str(spec.run_dir), rank, ranks)
        yield rank_cls.remote(made_from)


def _make_workers(spec: RunSpec, engines: tuple[str, ...]) -> Iterator[Handle]:
    worker_cls = ray.remote(EnvironmentActor)
    global_names = {name: _global_name(spec, name) for name in engines}
    for index in range(spec.config.environment.workers):
        worker = EnvironmentSpec(
            name=f"environment-{index}",
            config=spec.config,
            model_path=spec.config.model.path,
            working_dir=str(spec.working_dir),
            run_dir=str(spec.run_dir),
            engines=global_names,
        )
        yield worker_cls.options(num_cpus=0, max_restarts=-1).remote(worker)


def _global_name(spec: RunSpec, engine: str) -> str:
    """What an engine's actor is called on the cluster, where several runs may live."""
    return f"{spec.run_id}/{engine}"


def make_controller(spec: RunSpec, actors: Actors) -> Handle:
    """The controller's actor; it builds the run when told to run."""
    controller = ray.remote(ControllerActor).options(num_cpus=0, max_restarts=0)
    return controller.remote(partial(build_run, spec, actors))


def stop_ray(handles: list[Handle]) -> None:
    """Kill all actors and leave the cluster; a private one ends with us."""
    for handle in handles:
        ray.kill(handle)
    ray.shutdown()
