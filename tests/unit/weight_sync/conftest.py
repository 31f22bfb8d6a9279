"""Helpers of these tests are beside them."""

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext

import pytest
from victims import Victims

pytest.register_assert_rewrite("weight_models")


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """New ones cost milliseconds: the server has imported torch, and what they use."""
    context = mp.get_context("forkserver")
    modules = ("receiver", "transports.reshard_server", "transports.reshard_receiver")
    context.set_forkserver_preload([f"offbeat.weight_sync.{each}" for each in modules])
    return context


@pytest.fixture
def victims(processes: ForkServerContext) -> Iterator[Victims]:
    """No process outlives its test."""
    started = Victims(processes)
    yield started
    started.kill()
