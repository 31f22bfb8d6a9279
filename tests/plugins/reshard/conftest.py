"""Helpers of these tests are beside them."""

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext

import pytest
from victims import Victims

pytest.register_assert_rewrite("tests.support.weight_models")


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """New ones cost milliseconds: the server has imported torch, and what they use."""
    context = mp.get_context("forkserver")
    modules = ("weight_sync.receiver", "plugins.reshard.server", "plugins.reshard.receiver")
    context.set_forkserver_preload([f"offbeat.{each}" for each in modules])
    return context


@pytest.fixture
def victims(processes: ForkServerContext) -> Iterator[Victims]:
    """No process outlives its test."""
    started = Victims(processes)
    yield started
    started.kill()
