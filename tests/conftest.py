"""What every test runs under: one compute thread, no model hub, property tests without a time limit."""

import os

import hypothesis
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up before any test imports torch, transformers or Ray.

    Variables that are set already are left alone, so that one run can be made different by hand.
    """
    del config
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A loaded machine makes single examples slow without making them wrong.
    hypothesis.settings.register_profile("offbeat", deadline=None)
    # A change is judged by the same examples every time; fresh ones are looked for by hand.
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if "CI" in os.environ else "offbeat")
