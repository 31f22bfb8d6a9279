"""The one world of ranks that the suites of all backends share, models, a step, and what is right.

The table of docs/parity.md is written from what the suites have measured.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from parity_cases import Cut, Outcome, Step, random_step
from parity_table import ParityTable
from tiny_models import save_tiny_model
from world import World, a_world

from offbeat.config.loss_spec import LossSpec
from tests.support.grid_steps import Families

Models = Callable[[str], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-parity", action="store_true", help="write docs/parity.md from what is measured"
    )


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    yield from a_world()


@pytest.fixture(scope="session")
def parity_table(request: pytest.FixtureRequest) -> Iterator[ParityTable]:
    table = ParityTable()
    yield table
    if request.config.getoption("--write-parity", default=False):
        table.write()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Directories of tiny models by name."""
    root = tmp_path_factory.mktemp("models")

    def path_of(name: str) -> Path:
        path = root / name
        if not path.exists():
            save_tiny_model(name, path)
        return path

    return path_of


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Directories of tiny image-text models by family."""
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def model(families: Families) -> Path:
    """A directory of one of them."""
    return families("idefics3")


@pytest.fixture(scope="session")
def step() -> Step:
    return random_step()


@pytest.fixture(scope="session")
def want(world: World, models: Models, step: Step) -> Callable[..., Outcome]:
    """The torch trainer's single-shot step on one rank, with its gradient; made once each."""
    made = dict[str, Outcome]()

    def of(
        loss: LossSpec, model: str = "qwen3", cut: Cut | None = None, groups: int | None = None
    ) -> Outcome:
        cut, some = cut or Cut(), Step(step.groups[:groups], step.advantages[:groups])
        key = f"{loss} {model} {cut} {groups}"
        if key not in made:
            given = {"path": models(model), "cut": cut, "step": some, "loss": loss}
            (shot,) = world.run(1, "torch_backend.torch_jobs:single", **given)
            (whole,) = world.run(1, "torch_backend.torch_jobs:split", chunks=(1,), **given)
            made[key] = Outcome(shot.result, whole.gradients, shot.weights, shot.digest)
        return made[key]

    return of
