"""Helpers of these tests are beside them."""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

import pytest

pytest.register_assert_rewrite("weight_models", "broadcast_bench")


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """New ones cost milliseconds: the server has imported torch, and what they use."""
    context = mp.get_context("forkserver")
    modules = ("receiver", "transports.gloo_sender", "transports.reshard_receiver")
    context.set_forkserver_preload([f"offbeat.weight_sync.{each}" for each in modules])
    return context
