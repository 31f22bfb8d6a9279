"""One engine for all tests of a session: it takes half a minute to start.

Collected only where vLLM is installed: ``make test-vllm``.
"""

import asyncio
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "contract"))
pytest.register_assert_rewrite(
    "generator_contract", "stop_string_contract", "shared_engine", "outcomes"
)

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from pictured import DIGITS
    from releases import tied_model
    from shared_engine import Shared, endless_model, spec_in

    from tests.support.own_logging import own_logging

    _own_logging = pytest.fixture(autouse=True)(own_logging)

    @pytest.fixture(scope="session")
    def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
        """An engine that runs, and the event loop it belongs to."""
        with asyncio.Runner() as runner:
            shared = Shared(spec_in(tmp_path_factory.mktemp("engine")), runner)
            yield shared
            shared.close()

    @pytest.fixture(scope="session")
    def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
        """An engine of a model whose output head is its embedding."""
        folder = tmp_path_factory.mktemp("tied")
        with asyncio.Runner() as runner:
            tied = Shared(spec_in(folder, tied_model(folder / "model")), runner)
            yield tied
            tied.close()

    @pytest.fixture(scope="session")
    def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
        """An engine of a model that reads pictures."""
        folder = tmp_path_factory.mktemp("digits")
        with asyncio.Runner() as runner:
            digits = Shared(spec_in(folder, endless_model(folder, DIGITS)), runner)
            yield digits
            digits.close()


@pytest.fixture(scope="session", autouse=True)
def garbage() -> Iterator[None]:
    """Collect what vLLM's clients leave to the garbage collector while its warnings are let pass."""
    yield
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and what it imports are not ours to mend."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(300))
