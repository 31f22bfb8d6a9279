"""Published step times of other systems, beside what offbeat's controller would do with their costs.

    python -m benchmarks.published [verl marin one-step nemo areal]

Each row names its source and what was given there, fitted to some of its arms, and assumed. An arm
that something was fitted to is marked; the others are predicted. The virtual run has the rule of
the source where ``examples/samplers`` has it. Nothing here says that one system is faster than
another: the times are theirs, the controller is ours, and costs that nobody lists are missing.
"""

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from offbeat.config.run import RunConfig
from offbeat.plugins.planning.prediction import predict
from offbeat.plugins.planning.virtual_ports import Costs, GroupWork

_GROUPS: Final = 1024  # of which work is drawn, in turn
_RULES: Final = "examples.samplers.policies"


@dataclass(frozen=True)
class Arm:
    """One published step time, and how the virtual run differs from that of the other arms."""

    name: str
    published_s: float
    fitted: bool = False  # something of the source was fitted to it
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    longest: float | None = None  # tokens or seconds, where the arm has its own cut
    steps: int = 1  # steps of the virtual run in one of the source
    costs: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Source:
    """A published table: its costs, and its arms. Ratios are to the first arm."""

    title: str
    cited: str
    given: str
    fitted: str
    assumed: str
    groups: int
    samples: int  # sequences of a group that decode side by side; 1: a group is one time
    engines: int
    law: tuple[float, float, float]  # mean, sigma and cut of a log-normal
    costs: Costs
    arms: Sequence[Arm]
    longest_of: int = 1  # samples of which one time of a group is the longest

    def work(self, arm: Arm) -> list[GroupWork]:
        """Return the work of groups: the same lengths for each arm, cut where the arm says so."""
        mean, sigma, cut = self.law
        cut, mu = arm.longest or cut, math.log(mean) - sigma**2 / 2
        dice = random.Random(0)

        def drawn() -> float:
            return max(min(cut, dice.lognormvariate(mu, sigma)) for _ in range(self.longest_of))

        return [
            GroupWork(tuple(drawn() for _ in range(self.samples)), response_tokens=100)
            for _ in range(_GROUPS)
        ]

    def config(self, arm: Arm) -> RunConfig:
        """Return the recipe of an arm."""
        plain: dict[str, Any] = {
            "steps": 1,
            "groups_per_step": self.groups,
            "samples_per_group": max(2, self.samples),
            "model": {"path": "none"},
            "environment": {"name": "stub"},
            "generator": {"backend": "stub", "engines": self.engines},
            "trainer": {"backend": "stub", "min_tokens_per_chunk": 1},
        }
        return RunConfig.model_validate(plain | dict(arm.recipe))


def _rule(name: str, max_staleness: int, **options: float) -> dict[str, Any]:
    target = f"{_RULES}:{name}"
    return {
        "name": "custom", "target": target, "max_staleness": max_staleness, "options": options
    }  # fmt: skip


def verl() -> Source:
    """Return verl's fully asynchronous recipe: 64 GPUs train, 64 generate; four steps per sync."""

    def arm(threshold: float, published_s: float, *, fitted: bool = False) -> Arm:
        rule = _rule("ThresholdPerSync", 7, threshold=threshold, sync_interval=4)
        recipe = {"sampler": rule, "sync": {"interval": 4}}
        return Arm(f"threshold {threshold}", published_s, fitted, recipe, steps=4)

    return Source(
        "verl fully_async, 7B, 64:64 H20",
        "verl docs/advance/fully_async.md at 1dda039b",
        "update 98.8 s for four fetches of 128 prompts of 16 samples; step times",
        "lengths (mean 2400, sigma 0.6) and pace (8 ms, 25 us per sequence on 8 GPUs): to the colocated arm",
        "a sync takes 3 s of the trainer and 3 s of the engines; nothing bounds the oldest token (7)",
        128, 16, 8, (2400.0, 0.6, 28_000.0),
        Costs(8e-3, 0.2e-3 / 8, 98.8 / 4, 128, 3.0, 3.0, 3.0, slots=4096),
        [
            arm(0.0, 231.3, fitted=True), arm(0.1, 171.3), arm(0.3, 146.1), arm(0.5, 150.6),
        ],
    )  # fmt: skip


def marin() -> Source:
    """Return marin's run: one update of 128 responses, age at most 1, two caps of the length."""
    ours = {"sampler": {"name": "ready_first", "max_staleness": 1}}
    theirs = {"sampler": _rule("DiscardAtConsumption", 1, ahead=2.0)}
    return Source(
        "marin #8936, 32 + 8 H100",
        "github.com/marin-community/marin/issues/8936",
        "train 9.5 s, sync 20.4 s, 32 x 4 responses, 256 sequences, mean and truncated share of lengths",
        "pace (1/110 s, 64 us per sequence): to its ledger of tokens",
        "the sync is half the trainer's, half the engines'; lengths are log-normal (1200, 0.85)",
        32, 4, 1, (1200.0, 0.85, 2048.0),
        Costs(1 / 110, 64e-6, 9.5, 32, 10.2, 10.2, 10.2, slots=256),
        [
            Arm("cap 2048, its rule", 36.6, recipe=theirs),
            Arm("cap 4096, its rule", 48.1, recipe=theirs, longest=4096.0),
            Arm("cap 2048, ready_first", 36.6, recipe=ours),
            Arm("cap 4096, ready_first", 48.1, recipe=ours, longest=4096.0),
        ],
    )  # fmt: skip


def one_step() -> Source:
    """Return verl's one step off policy: generation of the next batch beside the training of this."""
    recipe = {
        "sampler": {"name": "in_order", "max_staleness": 1},
        "trainer": {"backend": "stub", "min_tokens_per_chunk": 10**9},
    }
    return Source(
        "verl one_step_off, 32 H20",
        "verl docs/advance/one_step_off.md at 1dda039b",
        "generate 458 and 501 s, update and log probs 445 and 467 s",
        "nothing",
        "a sync takes 20 s; a group is the longest of 16 times, cut where generation ends",
        64, 1, 4, (0.3 * 458, 0.5, 458.0),
        Costs(1.0, 0.0, 445.0, 64, 20.0, 20.0, 20.0),
        [
            Arm("FSDP2", 520.0, recipe=recipe),
            Arm("Megatron", 566.0, recipe=recipe, longest=501.0, costs={"step_s": 467.0}),
        ],
        longest_of=16,
    )  # fmt: skip


def nemo() -> Source:
    """Return NeMo-RL's DeepSeek-V3 recipe with one step of asynchrony, 256 GPUs for each side."""
    return Source(
        "NeMo-RL DeepSeek-V3, 512 H100",
        "NeMo-RL performance-summary.md at 7ea279ab",
        "on policy 134 s on 256 GPUs: generation, training and refit in turn",
        "nothing",
        "of the 134 s 60 generate, 60 train, 4 refit: the source does not split them",
        32, 1, 8, (0.46 * 60, 0.6, 60.0),
        Costs(1.0, 0.0, 60.0, 32, 4.0, 4.0, 4.0),
        [Arm("one step off", 64.1, recipe={"sampler": {"name": "ready_first", "max_staleness": 1}})],
        longest_of=16,
    )  # fmt: skip


SOURCES: Final[Mapping[str, Callable[[], Source]]] = {
    "verl": verl, "marin": marin, "one-step": one_step, "nemo": nemo
}  # fmt: skip
NOT_COMPARED: Final = {"areal": "AReaL v0.3, 41.0 h to 14.8 h: no breakdown of a step is published"}


def compare(source: Source) -> None:
    """Print a source, then its arms."""
    print(f"{source.title}: {source.cited}")
    for name in ("given", "fitted", "assumed"):
        print(f"  {name:8s} {getattr(source, name)}")
    head = "  arm                      virtual s  published s  error  ratio  published ratio"
    print(head)
    first: tuple[float, float] | None = None
    for arm in source.arms:
        costs = replace(source.costs, **arm.costs)  # pyright: ignore[reportArgumentType] - numbers
        pace = predict(source.config(arm), costs, source.work(arm))
        step_s = pace.step_s * arm.steps
        first = first or (step_s, arm.published_s)
        print(
            f"  {arm.name:24s} {step_s:9.1f}  {arm.published_s:11.1f} "
            f"{step_s / arm.published_s - 1:+6.0%} {first[0] / step_s:6.2f} "
            f"{first[1] / arm.published_s:16.2f}{'  fitted' if arm.fitted else ''}",
            flush=True,
        )


_ALL = "all"


def main() -> None:
    """Print the sources that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = (*SOURCES, *NOT_COMPARED)
    # A list as the default is held against the choices as a whole, in Python before 3.12.
    parser.add_argument("sources", nargs="*", choices=(*known, _ALL), default=_ALL)
    sources = parser.parse_args().sources
    for name in known if _ALL in sources else sources:
        if name in NOT_COMPARED:
            print(f"{name}: not compared: {NOT_COMPARED[name]}")
        else:
            compare(SOURCES[name]())


if __name__ == "__main__":
    main()
