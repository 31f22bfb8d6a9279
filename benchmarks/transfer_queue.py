"""The path of a run's groups against PyPI TransferQueue, in one Ray session.

    python -m benchmarks.transfer_queue [--rounds N] [--quick] [--without-peer] [--json FILE]

A worker's reply carries the packed columns of a group, the controller's index keeps their handle, and
the trainer receives them as arguments and reads them. The benchmark uses the ports of a run
(``RayRollouts``, ``QueueIndex``, ``RayTrainer``). The rollout and the training themselves are missing.
The peer has a producer and a consumer that call its client directly, without a controller.

A group has 16 samples of 2048 tokens, 13 bytes per token. Sides take turns within each round, and
medians of rounds are compared. ``make bench-queue`` creates the peer's environment.

stream    groups per second. As in a run, a step of 16 groups frees its room for the next groups.
put+get   one group that is alone on the path, less the same path with 8 tokens per sample: a run makes
          these two calls whatever its queue is, and the peer's figure does not contain them.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray

from benchmarks import queue_peer
from offbeat.actors.call_batching import BatchedReply, ReplyBatcher
from offbeat.actors.environment_worker_actor import COALESCED_BYTES
from offbeat.actors.ray_ports import RayRollouts
from offbeat.actors.ray_trainer import RayTrainer
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.failures import ActorLost, OffbeatError
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.messages.training import Chunk, ChunkResult
from offbeat.messages.worker_report import WorkerReport
from offbeat.trainers.held_columns import Places, merge_columns
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.index import QueueIndex
from offbeat.transfer_queue.tensordict_codec import build_chunk

SAMPLES: Final = 16
TOKENS: Final = 2048
FEW_TOKENS: Final = 8
GROUPS_PER_STEP: Final = 16
IN_FLIGHT: Final = 2 * GROUPS_PER_STEP  # max_staleness 1
FENCE: Final = Fence("benchmark", 1)
STORE_BYTES: Final = 2 * 2**30
LOGICAL_CPUS: Final = 16  # the peer's actors request one each
Columns = dict[str, NDArray[Any]]
Rounds = dict[str, list[float]]

BARS: Final = {"stream_1": 5.0, "stream_16": 8.0, "put_get": 5.0}
TITLES: Final = {
    "stream_1": "stream, one group per call, groups/s",
    "stream_16": "stream, 16 groups per call, groups/s",
    "put_get": "put+get of a group, ms",
    "alone": "  with the two calls of a run, ms",
    "wrong_rows": "rows lost or repeated",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of groups in one round."""

    single: int = 320
    batched: int = 640
    alone: int = 100


def group(number: int, tokens: int) -> Columns:
    """Return the columns of a group. Its rewards are its number."""
    rng, count = np.random.default_rng(number), SAMPLES * tokens
    return {
        schema.PROMPT_IDS: np.arange(64, dtype=np.int32),
        schema.RESPONSE_IDS: rng.integers(0, 150_000, count, dtype=np.int32),
        schema.RESPONSE_OFFSETS: np.arange(0, count + 1, tokens, dtype=np.int64),
        schema.LOSS_MASK: np.ones(count, np.bool_),
        schema.GENERATION_LOGPROBS: rng.random(count, dtype=np.float32),
        schema.WEIGHT_VERSIONS: np.zeros(count, np.int32),
        schema.REWARDS: np.full(SAMPLES, number, np.float32),
    }


def sample_rows(number: int) -> Columns:
    """Return the columns of a group with one row per sample, as the peer stores them."""
    not_per_sample = (schema.PROMPT_IDS, schema.RESPONSE_OFFSETS)
    columns = group(number, TOKENS)
    return {
        name: values.reshape(SAMPLES, -1)
        for name, values in columns.items()
        if name not in not_per_sample
    }


def count_wrong_rows(numbers: Sequence[int], groups: int) -> int:
    """Return how many rows are missing or repeated: each group has one row per sample."""
    seen = Counter(numbers)
    seen.subtract(dict.fromkeys(range(groups), SAMPLES))
    return sum(abs(surplus) for surplus in seen.values())


class Worker:
    """Environment worker whose groups exist before they are requested."""

    def __init__(self) -> None:
        self._groups = list[Columns]()
        self._replies = ReplyBatcher(
            self._roll_out,
            _as_failure,
            weigh=lambda made: made[0].payload_bytes,
            limit=COALESCED_BYTES,
        )

    async def prepare(self, groups: int, tokens: int) -> None:
        """Make the groups that ``exchange`` returns."""
        self._groups = [group(number, tokens) for number in range(groups)]

    @ray.method(num_returns=2)
    async def exchange(
        self,
        fence: Fence,
        requests: Sequence[tuple[int, RolloutTask]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> tuple[tuple[WorkerReport, list[BatchedReply[Receipt]]], list[Columns]]:
        """Return receipts and columns, as ``EnvironmentActor.exchange`` does."""
        answers = await self._replies.exchange(
            "controller", fence.run_id, requests, cancelled, doubted
        )
        made = [(each.id, each.value) for each in answers if each.value]
        receipts = [BatchedReply(id_, receipt) for id_, (receipt, _) in made]
        return (await self.ping(), receipts), [columns for _, (_, columns) in made]

    async def ping(self) -> WorkerReport:
        return WorkerReport("worker")

    async def alive(self) -> None: ...

    async def close(self) -> WorkerReport:
        return await self.ping()

    async def _roll_out(self, task: RolloutTask) -> tuple[Receipt, Columns]:
        columns = self._groups[task.prompt_index]
        tokens = len(columns[schema.RESPONSE_IDS]) // SAMPLES
        receipt = make_receipt(
            task.prompt_index,
            task.attempt,
            (((0, tokens),),) * SAMPLES,
            engine=task.engine,
            rewards=tuple(columns[schema.REWARDS].tolist()),
            prompt_tokens=(64,) * SAMPLES,
            columns=tuple(columns),
            payload_bytes=schema.payload_bytes(columns),
        )
        return receipt, columns


def _as_failure(error: Exception) -> OffbeatError:
    return ActorLost("worker", "a rollout", repr(error))


class Trainer:
    """Trainer rank that builds the chunk, reads its rewards and trains nothing."""

    def __init__(self) -> None:
        self._numbers = list[int]()

    def train_microbatch(
        self,
        _fence: Fence,
        _key: StepKey,
        prompt_indices: Sequence[int],
        _advantages: object,
        _minibatches: object,
        places: Places,
        _sent: int,
        *payloads: Sequence[schema.Columns],
    ) -> ChunkResult:
        """Note the group number of each sample."""
        for each in build_chunk(merge_columns(places, payloads)).unbind(0):
            self._numbers += map(int, each[schema.REWARDS].tolist())
        return ChunkResult(0, len(prompt_indices) * SAMPLES, 1, 0.0)

    def numbers(self) -> list[int]:
        """Return the group number of each sample since the last call."""
        numbers, self._numbers = self._numbers, []
        return numbers


class RunPath:
    """Controller's part of the path: rollout port, index and trainer port."""

    def __init__(self) -> None:
        self.worker: Any = ray.remote(Worker).options(num_cpus=0, max_concurrency=100).remote()
        self.rank: Any = ray.remote(Trainer).options(num_cpus=0).remote()
        self._rollouts, self._trainer = RayRollouts([self.worker]), RayTrainer([self.rank])
        self._index = QueueIndex()

    async def measure(self, sizes: Sizes) -> dict[str, float]:
        """Run one round."""
        most = max(sizes.single, sizes.batched, sizes.alone)
        await self.worker.prepare.remote(most, TOKENS)
        single = await self._stream(sizes.single, 1)
        wrong = count_wrong_rows(await self.rank.numbers.remote(), sizes.single)
        batched = await self._stream(sizes.batched, GROUPS_PER_STEP)
        wrong += count_wrong_rows(await self.rank.numbers.remote(), sizes.batched)
        alone_ms = await self._alone_ms(sizes.alone)
        await self.worker.prepare.remote(sizes.alone, FEW_TOKENS)
        calls_ms = await self._alone_ms(sizes.alone)
        await self.rank.numbers.remote()
        return {
            "stream_1": single,
            "stream_16": batched,
            "put_get": alone_ms - calls_ms,
            "alone": alone_ms,
            "wrong_rows": wrong,
        }

    async def _roll_out(self, number: int) -> int:
        """Commit one group to the index, as ``RolloutPump`` does; return its number."""
        task = RolloutTask(Prompt(number, 0, number, {}), 1, SAMPLES, "engine", 0, deadline_s=60.0)
        receipt, payload = await self._rollouts.rollout(FENCE, task)
        self._index.put(number, 1, receipt.columns, receipt.payload_bytes, payload)
        return number

    async def _train(self, numbers: Sequence[int]) -> None:
        """Train groups of the index as one chunk."""
        payloads = tuple(self._index.payloads(number) for number in numbers)
        chunk = Chunk(tuple(numbers), payloads, ((0.0,) * SAMPLES,) * len(numbers))
        await self._trainer.train_microbatch(FENCE, StepKey(1, 1, 1), chunk)

    async def _stream(self, groups: int, groups_per_call: int) -> float:
        """Return groups per second."""
        began, ready = time.monotonic(), asyncio.Queue[int]()
        async with asyncio.TaskGroup() as tasks:

            def request(first: int, count: int) -> None:
                for number in range(first, min(first + count, groups)):
                    task = tasks.create_task(self._roll_out(number))
                    task.add_done_callback(lambda done: ready.put_nowait(done.result()))

            request(0, IN_FLIGHT)
            for trained in range(0, groups, GROUPS_PER_STEP):
                step = list[int]()
                while len(step) < GROUPS_PER_STEP:
                    numbers = [await ready.get() for _ in range(groups_per_call)]
                    await self._train(numbers)
                    step += numbers
                self._index.clear(step)
                request(trained + IN_FLIGHT, GROUPS_PER_STEP)
        return groups / (time.monotonic() - began)

    async def _alone_ms(self, groups: int) -> float:
        taken = list[float]()
        for number in range(groups):
            began = time.monotonic()
            await self._train([await self._roll_out(number)])
            self._index.clear([number])
            taken.append(time.monotonic() - began)
        return statistics.median(taken) * 1e3


class Peer:
    """The peer's producer and consumer."""

    def __init__(self) -> None:
        self._producer, self._consumer = queue_peer.clients(schema.REWARDS, SAMPLES)

    def measure(self, sizes: Sizes) -> dict[str, float]:
        """Run one round."""
        figures = {"wrong_rows": 0.0}
        for groups, per_call in ((sizes.single, 1), (sizes.batched, GROUPS_PER_STEP)):
            ray.get(
                self._producer.prepare.remote([sample_rows(n) for n in range(groups)], per_call)
            )
            ray.get(self._consumer.prepare.remote([sample_rows(0)], 1))
            began, (ended, numbers) = ray.get(
                [
                    self._producer.produce.remote(),
                    self._consumer.consume.remote(groups // per_call, per_call),
                ]
            )
            figures[f"stream_{per_call}"] = groups / (ended - began)
            figures["wrong_rows"] += count_wrong_rows(numbers, groups)
        ray.get(self._producer.prepare.remote([sample_rows(n) for n in range(sizes.alone)], 1))
        figures["put_get"] = statistics.median(ray.get(self._producer.cycle.remote())) * 1e3
        return figures


def report(ours: Rounds, peer: Rounds) -> list[str]:
    """Return the table of medians, with the ratio to the peer and its bar."""
    lines = [
        f"{'median of rounds (lowest to highest)':42}{'offbeat':>24}{'TransferQueue':>24}  ratio"
    ]
    for key, title in TITLES.items():
        line = f"{title:42}{_cell(ours.get(key, [])):>24}{_cell(peer.get(key, [])):>24}"
        if peer and key in BARS:
            ratio = statistics.median(ours[key]) / statistics.median(peer[key])
            ratio = ratio if key.startswith("stream") else 1 / ratio
            verdict = "met" if ratio >= BARS[key] else "MISSED"
            line += f"  {ratio:.1f} (bar {BARS[key]:g}: {verdict})"
        lines.append(line)
    return lines


def _cell(rounds: Sequence[float]) -> str:
    if not rounds:
        return "-"
    low, median, high = min(rounds), statistics.median(rounds), max(rounds)
    return f"{median:,.4g} ({low:,.3g} to {high:,.3g})"


def main() -> None:
    """Print the table of medians."""
    parser = argparse.ArgumentParser(description="The transfer queue against PyPI TransferQueue.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: does it work")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures of each round here")
    arguments = parser.parse_args()
    sizes = Sizes(64, 64, 10) if arguments.quick else Sizes()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ours, peer = Rounds(), Rounds()
    asyncio.run(
        _measure(
            sizes,
            1 if arguments.quick else arguments.rounds,
            ours,
            None if arguments.without_peer else peer,
        )
    )
    ray.shutdown()
    print("\n".join(report(ours, peer)))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"offbeat": ours, "peer": peer}, indent=1))


async def _measure(sizes: Sizes, rounds: int, ours: Rounds, peer: Rounds | None) -> None:
    path, other = RunPath(), None if peer is None else Peer()
    warm_up = Sizes(32, 32, 5)
    await path.measure(warm_up)
    if other is not None:
        other.measure(warm_up)
    for _ in range(rounds):
        for key, value in (await path.measure(sizes)).items():
            ours.setdefault(key, []).append(value)
        if other is not None and peer is not None:
            for key, value in other.measure(sizes).items():
                peer.setdefault(key, []).append(value)
    if other is not None:
        queue_peer.stop()


if __name__ == "__main__":
    main()
