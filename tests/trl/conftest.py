"""The environment in which TRL is installed; the tests are skipped by name where there is none."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"


@pytest.fixture(scope="session")
def trl_python() -> Path:
    """The interpreter of the peer's environment, which `make test-trl` and `make bench` create."""
    if not PYTHON.exists() or not list(PYTHON.parents[1].glob("lib/*/site-packages/trl")):
        pytest.skip("TRL is not installed in .venv-trl: make test-trl")
    return PYTHON
