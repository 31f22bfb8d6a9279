"""``kill -9`` and ``kill -STOP`` at every chunk, on processes of their own."""

import multiprocessing as mp
import signal
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import pytest
from broadcast_bench import HASTY, PATIENT, Bench, End, end, names, together
from victims import Victims, strike_self
from weight_models import Model, equal, weights

from offbeat.weight_sync.errors import TransferFailed
from offbeat.weight_sync.manifest import Bytes
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.transports.gloo_receiver import Received


def engine(
    published: PublishedRelease, epoch: int, members: tuple[str, ...], at: int, sign: int
) -> None:
    """A process that takes a transfer, and strikes itself before it has chunk ``at``."""
    victim = end(members[0], Model(2))

    def sink(index: int, data: Bytes) -> None:
        if index == at:
            strike_self(sign)
        victim.receiver.apply(epoch, index, data)

    victim.take(published, epoch, members, sink)


def trainer(told: Connection, at: int, sign: int) -> None:
    """A process that sends, and strikes itself before it has sent chunk ``at``."""

    def strike(index: int) -> None:
        if index == at:
            strike_self(sign)

    bench = Bench(timeouts=PATIENT if sign == signal.SIGKILL else HASTY)
    told.send(bench.struck(strike))
    told.recv()


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(timeouts=request.param)
    yield made
    made.sender.close()


def survivors() -> tuple[list[Model], list[End]]:
    models = [Model(5), Model(6)]
    return models, [end(f"g{1 + index}", model) for index, model in enumerate(models)]


@pytest.mark.parametrize("bench", [PATIENT], indirect=True)
def test_at_every_chunk_an_engine_that_is_killed_is_left_and_the_others_get_all_at_once(
    bench: Bench, victims: Victims
) -> None:
    """With a slack of a minute, the test's own limit shows that nobody waits for the dead."""
    models, others = survivors()
    for at in range(bench.count):
        bench.model.embed.weight.data += 1
        published, epoch = bench.sender.publish(at), at + 1
        victims.start(engine, published, epoch, names(3), at, signal.SIGKILL)
        together(*(partial(each.take, published, epoch, names(3)) for each in others))
        for each, model in zip(others, models, strict=True):
            assert isinstance(each.outcome, Received), each.outcome
            assert equal(weights(model), weights(bench.model))


@pytest.mark.parametrize("bench", [HASTY], indirect=True)
@pytest.mark.parametrize("at", [0, 2])
def test_an_engine_that_is_stopped_is_left_at_the_limits_and_the_others_get_all(
    bench: Bench, victims: Victims, at: int
) -> None:
    models, others = survivors()
    published = bench.sender.publish(1)
    victims.start(engine, published, 1, names(3), at, signal.SIGSTOP)
    together(*(partial(each.take, published, 1, names(3)) for each in others))
    assert all(isinstance(each.outcome, Received) for each in others)
    assert all(equal(weights(model), weights(bench.model)) for model in models)
    bench.model.embed.weight.data += 1
    published = bench.sender.publish(2)
    together(*(partial(each.take, published, 2, ("g1", "g2")) for each in others))
    assert all(equal(weights(model), weights(bench.model)) for model in models)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_at_every_chunk_a_sender_that_is_lost_leaves_all_as_they_were(
    victims: Victims, sign: int
) -> None:
    models, others = survivors()
    before = [weights(model) for model in models]
    healthy = Bench()
    every = range(healthy.count) if sign == signal.SIGKILL else (0, 2)
    for at in every:
        ours, theirs = mp.Pipe()
        victims.start(trainer, theirs, at, sign)
        published, members = ours.recv(), ("g1", "g2")
        together(*(partial(each.take, published, at + 1, members) for each in others))
        for each in others:
            assert isinstance(each.outcome, TransferFailed), each.outcome
    assert all(map(equal, map(weights, models), before))
    published = healthy.sender.publish(1)
    together(*(partial(each.take, published, 99, ("g1", "g2")) for each in others))
    assert all(equal(weights(model), weights(healthy.model)) for model in models)
    healthy.sender.close()
