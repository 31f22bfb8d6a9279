"""The trainer benchmark on a toy: its sides do the same, its figures are what they are called."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.trainer import difference, make_sides
from benchmarks.trainer_cases import MODELS, TOY, make_batch, write_model
from benchmarks.trainer_flops import (
    Load,
    bare_matmul_flop_s,
    known_peak_flop_s,
    load_of,
    step_flops,
)
from benchmarks.trainer_memory import PHASES, peaks_mib
from benchmarks.trainer_rounds import Spread, Turn, in_turn, speedup
from benchmarks.trainer_sides import Outcome, Plain, Setting

ROW = TOY.prompt_tokens + TOY.response_tokens - 1  # the last token predicts nothing
SAMPLES = TOY.groups * TOY.samples


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    torch.set_num_threads(1)
    path = write_model(TOY.model, tmp_path_factory.mktemp("models") / "toy")
    return Setting(path, "cpu", "float32", 2 * ROW)  # several microbatches


def test_all_sides_take_the_same_steps_however_they_are_cut(setting: Setting) -> None:
    sides, groups, advantages = make_sides(TOY, setting)
    for chunks in (1, 2, 3, 1):
        outcomes = {name: each.step(groups, advantages, chunks) for name, each in sides.items()}
        assert difference(outcomes) < 1e-4
        assert outcomes["plain"].grad_norm > 0


def test_a_side_that_does_something_else_is_seen() -> None:
    outcomes = {"plain": Outcome(2.0, 4.0), "padded": Outcome(2.0, 4.0)}
    assert difference(outcomes) == 0
    assert difference(outcomes | {"shared": Outcome(2.0, 5.0)}) == pytest.approx(0.25)


def test_the_operations_of_a_step_are_those_one_counts_by_hand(setting: Setting) -> None:
    model, (groups, _) = Plain(setting).model, make_batch(TOY)
    load = load_of(model, groups, 64, shared_prompt=False)
    pairs = SAMPLES * ROW * (ROW + 1) // 2
    assert load == Load(SAMPLES * ROW, SAMPLES * TOY.response_tokens, pairs)
    size = MODELS[TOY.model]
    hidden, heads = size["hidden_size"], size["num_attention_heads"] * size["head_dim"]
    keys = size["num_key_value_heads"] * size["head_dim"]
    body = hidden * (2 * heads + 2 * keys + 3 * size["intermediate_size"])
    head = hidden * size["vocab_size"]
    by_hand = 6 * (body * load.tokens + head * load.places) + 12 * heads * load.pairs
    assert step_flops(model, load) == by_hand


def test_a_shared_prompt_counts_once_and_padding_never(setting: Setting) -> None:
    model, (groups, _) = Plain(setting).model, make_batch(TOY)
    shared = load_of(model, groups, 64, shared_prompt=True)
    assert shared.tokens == TOY.groups * (TOY.prompt_tokens + TOY.samples * (ROW - 4))
    assert shared.places == TOY.groups * (1 + TOY.samples * (TOY.response_tokens - 1))


def test_bare_products_have_a_speed_and_a_cpu_no_known_peak(setting: Setting) -> None:
    assert bare_matmul_flop_s(Plain(setting).model, Load(8, 4, 0), repeats=1) > 0
    assert known_peak_flop_s(torch.device("cpu"), "float32") is None


@pytest.mark.parametrize("side", ["plain", "shared"])
def test_memory_has_a_figure_for_every_phase(setting: Setting, side: str) -> None:
    assert set(peaks_mib(side, TOY, setting)) == set(PHASES)


def ticks(step_s: dict[str, float]) -> tuple[dict[str, Callable[[], None]], list[str], Callable]:
    """Sides whose steps take these times, of which the CPU has half; and who took a step when."""
    now_s, taken = [0.0], list[str]()

    def step(name: str) -> None:
        now_s[0] += step_s[name]
        taken.append(name)

    steps = {name: lambda name=name: step(name) for name in step_s}
    return steps, taken, lambda: (now_s[0], now_s[0] / 2)


def test_sides_take_equal_turns_and_each_round_begins_with_another() -> None:
    steps, taken, clock = ticks({"a": 1.0, "b": 2.0})
    turns = in_turn(steps, rounds=2, turn_s=3.0, clock=clock)
    assert turns == {"a": [Turn(1.0, 0.5)] * 2, "b": [Turn(2.0, 1.0)] * 2}
    measured: Iterator[str] = iter(taken[-12:])
    assert "".join(measured) == "aaabbbbbbaaa"


def test_a_speedup_is_taken_round_by_round() -> None:
    ours, theirs = [Turn(1, 1), Turn(4, 1), Turn(2, 1)], [Turn(2, 3), Turn(4, 3), Turn(6, 3)]
    assert speedup(ours, theirs) == Spread(2, 1, 3)
    assert f"{speedup(ours, theirs, cpu=True):.1f}" == "3.0 (3.0 to 3.0)"


def test_a_model_is_the_same_each_time_it_is_written(tmp_path: Path) -> None:
    first, second = (write_model("toy", tmp_path / name) for name in "ab")
    weights = "model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
