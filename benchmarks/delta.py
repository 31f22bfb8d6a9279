"""Measures delta releases: how much of a model changes per step, and a sync by delta beside a full one.

    python benchmarks/delta.py MODEL_DIRECTORY                          # three learning rates, bfloat16
    python benchmarks/delta.py MODEL_DIRECTORY --wire float32 --rates 1e-6
    python benchmarks/delta.py MODEL_DIRECTORY --rounding nearest stochastic --rates 1e-6 1e-5

With ``--rounding`` gradients are taken at bfloat16 copies of the masters, rounded as the torch trainer rounds them, and
it prints only how many of them a step changes.

Trains a Hugging Face model on the pages of this repository with AdamW, float32 masters and no warm-up,
and publishes its weights after each step from two senders in turn, one with deltas: the same weights,
the same minute. A receiver fetches both over TCP on this machine, loads and commits them; what it then
holds is compared bit by bit. Medians over the steps after the first.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from offbeat.plugins.delta.kept_release import HeldRelease, check_delta, rebuilt
from offbeat.plugins.reshard.messages import ShardRoute, TransferTimeouts
from offbeat.plugins.reshard.receiver import ReshardReceiver
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.plugins.reshard.server import ReshardServer
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.torch.optimizer import round_stochastically
from offbeat.weight_sync.buffers import Buffers
from offbeat.weight_sync.chunks import iterate_weights, on_host
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.transport import PublishedRelease, WholeShards
from tests.support.plain_modules import ModuleReceiver, ModuleSource

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
MIB = 1 << 20
ROWS, TOKENS = 2, 128
TIMEOUTS = TransferTimeouts(slowest_bytes_per_s=2e6, slack_s=60.0)


class Sync(NamedTuple):
    """Seconds of one sync, and its bytes on the wire."""

    publish_s: float  # packing and digests, for a delta comparing and encoding too
    receive_s: float  # transfer and digests, for a delta rebuilding too
    load_s: float  # digests, staging and commit
    nbytes: int


class End:
    """One engine's end: a module, and the release that it serves."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self._receiver = module, ModuleReceiver(module, name)
        self._transport, self._buffers, self._epoch = ReshardReceiver(name), Buffers(), 0
        self._base: HeldRelease | None = None

    def take(self, published: PublishedRelease, publish_s: float) -> Sync:
        """Receive, load and commit a release, by its delta where it has one."""
        delta, nbytes = published.delta, published.manifest.nbytes
        if delta is None or self._base is None:
            receive_s, chunks = timed(
                lambda: self._received(published.handles[0], published.manifest)
            )
        else:
            base, nbytes = self._base, delta.nbytes

            def rebuild() -> tuple[Bytes, ...]:
                parts = self._received(delta.chunks[0], delta.manifest, published.manifest)
                check_delta(self._epoch, delta, parts)
                return rebuilt(self._epoch, base, published.manifest, parts, self._buffers.lend)

            receive_s, chunks = timed(rebuild)
        load_s, _ = timed(lambda: self._load(published, chunks))
        self._base = HeldRelease(published.digest, published.manifest, list(chunks))
        return Sync(publish_s, receive_s, load_s, nbytes)

    def _received(
        self, route: ShardRoute, manifest: Manifest, release: Manifest | None = None
    ) -> tuple[Bytes, ...]:
        self._epoch += 1
        needed = range(len(route.buckets))
        got = self._transport.receive(route, self._epoch, manifest, needed=needed, release=release)
        return tuple(on_host(each) for each in got.buckets)

    def _load(self, published: PublishedRelease, chunks: tuple[Bytes, ...]) -> None:
        self._receiver.begin(self._epoch, published.manifest)
        for index, chunk in enumerate(chunks):
            self._receiver.apply(self._epoch, index, chunk)
        self._receiver.verify(published.digest)
        self._receiver.commit(self._epoch)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a call takes, and its result."""
    since = time.perf_counter()
    value = work()
    return time.perf_counter() - since, value


def batches(tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield rows of tokens of the pages of this repository."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md")))
    ids = torch.tensor(tokenizer.encode(text).ids)
    for start in range(0, len(ids) - ROWS * TOKENS, ROWS * TOKENS):
        yield ids[start : start + ROWS * TOKENS].view(ROWS, TOKENS)


def loaded(path: str, dtype: torch.dtype) -> nn.Module:
    """Load the model in one type."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model


def rounded(module: nn.Module, wire: str) -> dict[str, Tensor]:
    """Return copies of the weights in the type of the wire, as integers of its width."""
    dtype: torch.dtype = getattr(torch, wire)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return {
        name: each.to(dtype, copy=True).contiguous().view(bits)
        for name, each in iterate_weights(module)
    }


def changed_share(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Return the share of the values whose bits differ."""
    differing = sum(int(before[name].ne(each).sum()) for name, each in after.items())
    return differing / sum(each.numel() for each in after.values())


def same_bits(source: nn.Module, served: nn.Module) -> bool:
    """Return whether the served weights are the trainer's, rounded, bit by bit."""
    dtype = {name: each.dtype for name, each in iterate_weights(served)}
    held = dict(iterate_weights(served))
    return all(
        torch.equal(
            each.to(dtype[name]).contiguous().view(torch.uint8),
            held[name].contiguous().view(torch.uint8),
        )
        for name, each in iterate_weights(source)
    )


def run(path: str, wire: str, rate: float, steps: int, chunk_mib: int) -> dict[str, Any]:
    """Train some steps at one learning rate; return what each changed, and what both syncs took."""
    model, served = loaded(path, torch.float32), loaded(path, getattr(torch, wire))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    policy = WirePolicy(wire)
    senders = {
        kind: ReshardSender(
            WholeShards(ModuleSource(model, chunk_mib * MIB, policy)),
            ReshardServer(host="127.0.0.1", incarnation=kind, timeouts=TIMEOUTS),
            SingleRank(),
            delta=kind == "delta",
        )
        for kind in ("full", "delta")
    }
    end = End(served, "engine")
    syncs: dict[str, list[Sync]] = {"full": [], "delta": []}
    changed, rows = list[float](), batches(Tokenizer.from_file(f"{path}/tokenizer.json"))
    for step in range(steps + 1):
        if step:
            before = rounded(model, wire)
            ids = next(rows)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            changed.append(changed_share(before, rounded(model, wire)))
        # The delta first: the full release is not the base of it, so both take the same change.
        for kind in ("delta", "full"):
            sender = senders[kind]
            publish_s, published = timed(partial(sender.publish, step))
            syncs[kind].append(end.take(published, publish_s))
            if not same_bits(model, served):
                raise SystemExit(f"{kind} release of step {step} differs from the weights")
    for sender in senders.values():
        sender.close()
    return {"wire": wire, "rate": rate, "steps": steps, "changed": changed} | {
        kind: {
            name: statistics.median(getattr(each, name) for each in taken[2:])
            for name in Sync._fields
        }
        for kind, taken in syncs.items()
    }


def rounded_steps(path: str, rounding: str, rate: float, steps: int) -> list[float]:
    """Train some steps at bfloat16 weights with float32 masters; return the share that each changed.

    Gradients are computed in float32 at the rounded weights: few processors multiply bfloat16 fast.
    """
    model = loaded(path, torch.float32)
    weights, parameters = dict(iterate_weights(model)), dict(model.named_parameters())
    masters = {name: each.detach().clone() for name, each in weights.items()}
    halves = {name: each.bfloat16() for name, each in weights.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=rate, weight_decay=0.0)
    changed, rows = list[float](), batches(Tokenizer.from_file(f"{path}/tokenizer.json"))
    for step in range(1, steps + 1):
        for name, half in halves.items():
            weights[name].copy_(half)
        ids = next(rows)
        model(input_ids=ids, labels=ids).loss.backward()
        for name, master in masters.items():
            master.grad = parameters[name].grad
        optimizer.step()
        model.zero_grad()
        before = rounded(model, "bfloat16")
        for name, master in masters.items():
            if rounding == "stochastic":
                round_stochastically(halves[name], master, name, step)
            else:
                halves[name].copy_(master)
            weights[name].copy_(halves[name])
        changed.append(changed_share(before, rounded(model, "bfloat16")))
    return changed


def main() -> None:
    """Print the figures of each learning rate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 2e-5])
    parser.add_argument("--wire", default="bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounding", nargs="+", choices=["nearest", "stochastic"], default=[])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.rounding:
        for rate, rounding in product(given.rates, given.rounding):
            shares = rounded_steps(given.model, rounding, rate, given.steps)
            print(f"{rounding} {rate:g}: changed {', '.join(f'{each:.2%}' for each in shares)}")
        return
    for rate in given.rates:
        figures = run(given.model, given.wire, rate, given.steps, given.chunk_mib)
        full, delta = figures["full"], figures["delta"]
        share = delta["nbytes"] / full["nbytes"]
        changes = ", ".join(f"{each:.2%}" for each in figures["changed"])
        print(f"{given.wire} {rate:g}: changed {changes}; bytes {share:.2%} of {full['nbytes']:,}")
        for kind in ("full", "delta"):
            parts = ", ".join(f"{k} {v:.3f}" for k, v in figures[kind].items() if k != "nbytes")
            print(f"  {kind:5} {parts}")
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
