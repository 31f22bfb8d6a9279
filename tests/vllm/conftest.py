"""One engine for all tests of a session: it takes half a minute to start.

Collected only where vLLM is installed: ``make test-vllm``.
"""

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "contract"))
pytest.register_assert_rewrite("generator_contract", "shared_engine", "outcomes")

_found = importlib.util.find_spec("vllm")
HAS_VLLM = _found is not None and _found.origin is not None  # this folder itself has no origin
if not HAS_VLLM:
    collect_ignore_glob = ["test_*.py"]
else:
    from own_logging import own_logging
    from shared_engine import Shared, spec_in

    _own_logging = pytest.fixture(autouse=True)(own_logging)

    @pytest.fixture(scope="session")
    def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
        """An engine that runs, and the event loop it belongs to."""
        with asyncio.Runner() as runner:
            shared = Shared(spec_in(tmp_path_factory.mktemp("engine")), runner)
            yield shared
            shared.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and what it imports are not ours to mend."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(300))
