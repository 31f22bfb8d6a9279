"""Sweeps of a trainer: points, outcomes, the search for the largest budget, and resumption."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from benchmarks.trainer_cases import write_model
from offbeat.config.loader import load_recipe
from offbeat.config.loss_spec import LossSpec
from offbeat.launch.commands.main import app
from offbeat.plugins.planning.fabricated import LengthLaw, UnusableLengths, count_tokens, fabricate
from offbeat.plugins.planning.sweep import (
    TOKENS,
    check_gpus,
    combine_replies,
    largest_budget,
    run_ranks,
)
from offbeat.plugins.planning.sweep_points import (
    Outcome,
    SweepFile,
    SweepPoint,
    UnusableSweep,
    combinations,
    table,
)
from offbeat.plugins.planning.sweep_rank import WHOLE, PhaseTimes, one_step
from offbeat.plugins.planning.sweep_task import RankFailed, RankTask, share_of_minibatches
from offbeat.trainers.memory import PeakMemory, ResidentMeter
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.torch_trainer import build_torch_trainer

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def sweep(*args: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *args])


def tasks(ranks: int) -> list[RankTask]:
    config = load_recipe(QUICKSTART).config.model_dump_json()
    replicas = Replicas(ranks)
    return [RankTask(config, LengthLaw(), 1, None, rank, replicas, None) for rank in range(ranks)]


# --- lengths -------------------------------------------------------------------------------------


def test_drawn_lengths_follow_their_law() -> None:
    law = LengthLaw(mean=200, sigma=0.8, clip=10_000)
    drawn = law.draw(np.random.default_rng(0), 20_000)
    assert drawn.mean() == pytest.approx(200, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.03)


@given(st.integers(1, 50), st.floats(0, 2), st.integers(1, 60), st.integers(0, 99))
def test_groups_are_the_same_for_a_seed_and_within_their_bounds(
    mean: int, sigma: float, clip: int, seed: int
) -> None:
    law = LengthLaw(mean, sigma, clip, prompt=4)
    groups = fabricate(law, 2, 3, 17, seed)
    for group, again in zip(groups, fabricate(law, 2, 3, 17, seed), strict=True):
        assert all((group[name] == again[name]).all() for name in group)
        lengths = np.diff(group["response_offsets"])
        assert len(lengths) == 3
        assert lengths.min() >= 1
        assert lengths.max() <= clip
        assert count_tokens(group) == 3 * 4 + lengths.sum()
        assert group["response_ids"].max() < 17


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mean=0", "lengths: mean=0, expected a positive number"),
        ("middle=3", "lengths: 'middle', expected one of mean, sigma, clip, prompt"),
        ("sigma=wide", "lengths: sigma='wide', expected a number"),
        ("sigma=nan", "lengths: sigma=nan, expected a positive number"),
    ],
)
def test_a_law_that_is_none_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UnusableLengths, match=sentence):
        LengthLaw.parse(text)


# --- points --------------------------------------------------------------------------------------


def test_every_combination_is_a_point_and_the_last_axis_is_fastest() -> None:
    assert combinations(["a=1,2", "b={x: 1},true"]) == [
        ("a=1", "b={x: 1}"),
        ("a=1", "b=true"),
        ("a=2", "b={x: 1}"),
        ("a=2", "b=true"),
    ]
    assert combinations([]) == [()]


@pytest.mark.parametrize(
    "given", [["trainer.encoder.data_parallel=1"], ["--over", "trainer.encoder.data_parallel=1"]]
)
def test_encoder_ranks_are_refused_because_fabricated_groups_have_no_pictures(
    tmp_path: Path, given: list[str]
) -> None:
    recipe = str(ROOT / "recipes" / "quickstart-images.yaml")
    done = sweep(recipe, "--out", str(tmp_path / "points.jsonl"), *given)
    assert done.exit_code == 2
    assert "trainer.encoder is set" in done.stderr


@pytest.mark.parametrize("axes", [["a"], ["a="], ["a=1", "a=2"], ["a=[1"]])
def test_an_axis_without_values_or_given_twice_is_refused(axes: list[str]) -> None:
    with pytest.raises(UnusableSweep, match="--over a"):
        combinations(axes)


def test_a_sweep_on_gpus_is_refused_at_once_on_a_machine_without_one() -> None:
    on_cpu = load_recipe(QUICKSTART).config
    on_gpu = load_recipe(QUICKSTART, ["trainer.device=cuda", "trainer.gpus=1"]).config
    varied = ["trainer.threads=1,2", "trainer.device=cpu,cuda"]
    with pytest.raises(UnusableSweep, match="device=cuda, and torch finds no GPU on this machine"):
        check_gpus(on_gpu, [], count=lambda: 0)
    with pytest.raises(UnusableSweep, match="device=cpu,cuda, and torch finds no GPU"):
        check_gpus(on_cpu, varied, count=lambda: 0)
    check_gpus(on_gpu, ["trainer.device=cpu"], count=lambda: 0)
    check_gpus(on_cpu, [], count=lambda: 0)
    check_gpus(on_gpu, [], count=lambda: 1)


def test_a_sweep_of_a_recipe_asks_for_gpus_before_it_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "points.jsonl"
    done = sweep(str(QUICKSTART), "trainer.device=cuda", "trainer.gpus=1", "--out", str(out))
    assert done.exit_code == 2
    assert "torch finds no GPU" in done.stderr
    assert not out.exists()


def budgets(limit: int, outcome: Outcome = "out_of_memory") -> Callable[..., SweepPoint]:
    """Measurements of a trainer that fits up to so many tokens, of a step of 5,000."""

    def measured(settings: tuple[str, ...]) -> SweepPoint:
        tokens = int(settings[-1].removeprefix(f"{TOKENS}="))
        return SweepPoint(settings, "ok" if tokens <= limit else outcome, tokens=5000, ranks=1)

    return measured


@given(st.integers(0, 6000), st.integers(4, 1000))
def test_the_largest_budget_is_found_to_a_quarter_of_the_first(limit: int, first: int) -> None:
    points = largest_budget((), first, budgets(limit))
    tried = {int(each.settings[0].partition("=")[2]): each.outcome for each in points}
    assert len(tried) == len(points), "never the same point twice"
    fitting = [tokens for tokens, outcome in tried.items() if outcome == "ok"]
    unit = first // 4
    if max(tried) >= 5000 and tried[max(tried)] == "ok":
        assert limit >= 5000
    else:
        assert max(fitting, default=0) <= limit < max(fitting, default=0) + unit


def test_a_failure_that_is_not_of_memory_ends_the_search() -> None:
    assert len(largest_budget((), 64, budgets(10, "failed"))) == 1


def test_a_sweep_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file, done = SweepFile(path, "same"), SweepPoint(("a=1",), "ok", step_s=2.0, ranks=1)
    file.add(done)
    path.write_bytes(path.read_bytes() + b'{"settings":["a=2"],"outco')
    again = SweepFile(path, "same")
    assert list(again) == [done]
    again.add(SweepPoint(("a=2",), "hung"))
    assert [each.settings for each in SweepFile(path, "same")] == [("a=1",), ("a=2",)]


def test_a_file_of_another_sweep_is_not_written_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    SweepFile(path, "one").add(SweepPoint((), "hung"))
    before = path.read_bytes()
    with pytest.raises(UnusableSweep, match="has a sweep of another recipe"):
        SweepFile(path, "another")
    assert path.read_bytes() == before


def test_the_table_ranks_by_tokens_per_second_and_names_what_failed() -> None:
    slow = SweepPoint(("a=1",), "ok", ranks=2, step_s=2.0, tokens=4000, peak_mib=1500.0)
    fast = SweepPoint(("a=2",), "ok", ranks=1, step_s=1.0, tokens=4000, peak_mib=3000.0)
    assert table([slow]).splitlines()[1].split() == ["a=1", "2", "2", "1,000", "1,500"]
    full = SweepPoint(("a=3",), "out_of_memory", "no 4 GiB")
    lines = table([full, slow, fast]).splitlines()
    assert [line.split()[0] for line in lines] == ["settings", "a=2", "a=1", "a=3"]
    assert lines[1].split() == ["a=2", "1", "1", "4,000", "3,000"]
    assert lines[3].endswith("out of memory: no 4 GiB")


def test_the_estimate_stands_beside_the_measurement_also_of_a_point_that_did_not_fit() -> None:
    measured = SweepPoint(("a=1",), "ok", ranks=1, step_s=1.0, tokens=4000, peak_mib=1500.0)
    known = msgspec.structs.replace(measured, held_mib=1000.0, activations_mib=432.1)
    lower_bound = msgspec.structs.replace(measured, held_mib=1000.0)
    full = SweepPoint(("a=1",), "out_of_memory", "no 4 GiB", held_mib=1000.0, activations_mib=900.0)
    rows = [table([each]).splitlines()[1].split() for each in (known, lower_bound, full)]
    assert rows[0][-2:] == ["1,432", "1,500"]
    assert rows[1][-2:] == [">1,000", "1,500"]
    assert rows[2][:2] == ["a=1", "1,900"]


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "deadline_s", "outcome", "detail"),
    [
        ("measures", 2, 60, "ok", ""),
        ("second_is_killed", 2, 60, "killed", "ended by signal 9 without a message"),
        ("second_is_full", 2, 60, "out_of_memory", "4 GiB"),
        ("is_killed_in_the_middle_of_a_word", 1, 60, "killed", "ended by signal 9"),
        ("hangs", 1, 0.5, "hung", "no answer within 0.5 s"),
    ],
)
def test_whatever_becomes_of_a_rank_is_the_outcome_of_its_point(
    tmp_path: Path, kind: str, ranks: int, deadline_s: float, outcome: Outcome, detail: str
) -> None:
    command = (sys.executable, "-m", "tests.plugins.planning.sweep_ranks", kind)
    replies = run_ranks(tasks(ranks), deadline_s, tmp_path / "log", command)
    point = combine_replies(("a=1",), replies, deadline_s)
    assert point.outcome == outcome
    assert detail in point.detail
    if outcome == "ok":
        assert (point.ranks, point.step_s, point.peak_mib) == (2, 1.5, 65.0), "of the slowest rank"
        assert (point.phases_mib, point.phases_s) == ({"train": 65.0}, {"train": 0.5})


def test_under_a_limit_what_fits_does_not_depend_on_the_order_of_frees_or_on_threads(
    tmp_path: Path,
) -> None:
    [free] = tasks(1)
    limited = msgspec.structs.replace(free, memory_mib=100)
    command = (sys.executable, "-m", "tests.plugins.planning.sweep_ranks", "names_its_allocator")
    for task, allocator in ((free, "unset unset"), (limited, "65536 1")):
        [reply] = run_ranks([task], 60, tmp_path / "log", command)
        assert reply == RankFailed(out_of_memory=False, error=allocator)


A_SWEEP = """
import os, subprocess, sys
rank = (sys.executable, "-m", "tests.plugins.planning.sweep_ranks", "says_half_a_word_and_hangs")
process = subprocess.Popen(
    [*rank, sys.argv[1], str(os.getpid())],
    stdin=subprocess.PIPE, pass_fds=[int(sys.argv[1])], start_new_session=True,
)
process.stdin.write(sys.stdin.buffer.read())
process.stdin.close()
process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_a_rank_ends_with_a_sweep_that_is_killed() -> None:
    ours, theirs = os.pipe()
    [task] = tasks(1)
    sweep_process = subprocess.Popen(
        [sys.executable, "-c", A_SWEEP, str(theirs)],
        stdin=subprocess.PIPE,
        pass_fds=[theirs],
        cwd=ROOT,
    )
    os.close(theirs)
    assert sweep_process.stdin is not None
    with sweep_process.stdin as pipe:
        pipe.write(msgspec.msgpack.encode(task))
    with open(ours, "rb") as said:  # noqa: PTH123 -- a descriptor
        assert said.read(1) == b"\x82"
        sweep_process.kill()
        sweep_process.wait()
        ended, _, _ = select.select([said], [], [], 30)
        assert ended, "the rank goes on"
        assert said.read() == b""


def test_sizes_that_contradict_the_recipe_or_the_model_start_no_process(tmp_path: Path) -> None:
    out = tmp_path / "points.jsonl"
    over = ("--over", "trainer.backend=megatron", "--over", "trainer.tensor_parallel=3")
    done = sweep(str(QUICKSTART), *over, "--out", str(out))
    assert done.exit_code == 1, done.output
    assert "invalid: trainer.tensor_parallel is 3, expected a divisor of" in done.stdout
    assert not out.with_suffix(".log").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--over", "trainer.threads"), "--over trainer.threads: expected KEY=VALUE,VALUE"),
        (("--largest", "--over", f"{TOKENS}=1,2"), f"--largest searches {TOKENS}"),
        (("--lengths", "mean=500,prompt=64"), "at most generator.max_model_len=512"),
        (("--out", str(ROOT)), f"--out {ROOT} is a directory: name a file in it"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, args: tuple[str, ...], sentence: str
) -> None:
    done = sweep(str(QUICKSTART), "--out", str(tmp_path / "points.jsonl"), *args)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_ranks_of_a_sweep_have_groups_of_every_minibatch_as_in_a_run() -> None:
    overrides = ["algorithm.minibatches=3", "groups_per_step=9"]
    config = load_recipe(QUICKSTART, overrides).config
    groups = fabricate(LengthLaw(), 9, 2, 64, seed=0)
    shares = [share_of_minibatches(groups, config, Replicas(2), rank) for rank in (0, 1)]
    assert sorted(at for own, _ in shares for at in own) == list(range(9))
    assert all(set(minibatches) == {0, 1, 2} for _, minibatches in shares)
    sizes = np.bincount([each for _, minibatches in shares for each in minibatches])
    assert sizes.tolist() == [3, 3, 3]


def test_a_sweep_takes_the_optimizer_steps_of_the_recipe(tmp_path: Path) -> None:
    model = write_model("toy", tmp_path / "toy")
    overrides = [f"model.path={model}", "algorithm.minibatches=3", "groups_per_step=3"]
    config = load_recipe(QUICKSTART, [*overrides, "samples_per_group=2"]).config
    groups = fabricate(LengthLaw.parse("mean=8,prompt=4"), 3, 2, 32, seed=0)
    _, minibatches = share_of_minibatches(groups, config, Replicas(1), 0)
    trainer = build_torch_trainer(TrainerSpec(config, str(tmp_path), 0, 1), SingleRank())
    for group in groups:
        group["generation_logprobs"] = np.zeros(len(group["response_ids"]), np.float32)
    loss, peaks, times = LossSpec.of(config), PeakMemory(ResidentMeter()), PhaseTimes()
    for _ in range(3):
        times.begin_step()
        result = one_step(trainer, groups, [(1.0, -1.0)] * 3, loss, peaks, minibatches, times)
        assert result.metrics["train/optimizer_steps"] == 3
    assert trainer.steps_applied == 3
    medians = times.medians()
    assert medians.keys() == {"train", "finish", WHOLE}
    assert 0 < medians["finish"] < medians[WHOLE]


@pytest.mark.long
def test_a_real_trainer_is_measured_until_its_memory_is_full(tmp_path: Path) -> None:
    model = write_model("toy", tmp_path / "toy")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"extends: {QUICKSTART}\nmodel: {{path: {model}}}\n"
        "groups_per_step: 1\nsamples_per_group: 96\ntrainer: {shared_prompt: false}\n"
    )
    out = tmp_path / "points.jsonl"
    done = sweep(
        *(str(recipe), "--over", f"{TOKENS}=1024,65536", "--out", str(out)),
        *("--lengths", "mean=400,prompt=8", "--steps", "1", "--memory-mib", "60"),
    )
    assert done.exit_code == 0, done.output
    _, *lines = out.read_bytes().splitlines()
    small, large = (msgspec.json.decode(line, type=SweepPoint) for line in lines)
    assert (small.outcome, large.outcome) == ("ok", "out_of_memory"), done.stdout
    assert small.tokens == 96 * 408
    assert small.parameters == 3_392
    assert 0 < small.peak_mib < 60
    assert small.step_s > 0
    assert small.held_mib == large.held_mib
    declared = 4 * 4 * 3_392 / 2**20  # weights, gradients, two moments
    assert small.held_mib == pytest.approx(declared, rel=0.01), "and frequencies of positions"
    assert small.activations_mib
    assert large.activations_mib
    assert small.activations_mib < 60 < large.activations_mib, "the limit of both, in MiB"
    assert {"train", "finish"} <= small.phases_s.keys() & small.phases_mib.keys()
    assert sum(small.phases_s.values()) == pytest.approx(small.step_s, rel=0.01)
