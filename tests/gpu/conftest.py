"""Tests of a CUDA machine: ``make test-gpu``. Elsewhere each is skipped by name.

With ``--gpu-device cpu`` the same tests rehearse on a machine without a GPU.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_figures import Figure, append

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "models" / "tiny-addition"
Measured = Callable[[str, float, str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="file that figures are appended to")
    parser.addoption(
        "--curve", type=Path, help="file that the metrics of the quickstart are copied to"
    )
    parser.addoption("--gpu-device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.addoption("--gpu-model", type=Path, default=TINY, help="model of the run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--gpu-device", "cuda")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            # Packages of such a machine are of other versions, which warn of other things.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if device == "cuda" and not _has_cuda():
                item.add_marker(pytest.mark.skip(reason="no CUDA device: make test-gpu runs it"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the torch device under test."""
    return str(request.config.getoption("--gpu-device", "cuda"))


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Path:
    """Return the directory of the model that the runs train."""
    return Path(str(request.config.getoption("--gpu-model", str(TINY))))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Return a function that records a figure: what, value, unit, how."""
    path = request.config.getoption("--figures", None)

    def record(what: str, value: float, unit: str, how: str) -> None:
        if path is not None:
            append(Path(str(path)), Figure(what, value, unit, how))

    return record


@pytest.fixture
def curve(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the file for the metrics of the quickstart."""
    return Path(str(request.config.getoption("--curve", None) or tmp_path / "curve.jsonl"))


@pytest.fixture
def run_root(tmp_path: Path) -> Iterator[Path]:
    """Return a directory for runs; it is removed at once, as models are large."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 -- only where one of these tests is collected

    return torch.cuda.is_available()
