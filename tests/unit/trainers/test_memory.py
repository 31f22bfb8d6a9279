"""High-water marks of memory, by phase; room for a pass."""

import mmap
from pathlib import Path

import pytest
import torch

from offbeat.config.sections.trainer import StubTrainerConfig
from offbeat.messages.training import StepResult
from offbeat.telemetry.metric_table import METRICS
from offbeat.trainers.batches.packing import PackedRows, pack_rows
from offbeat.trainers.memory import PeakMemory, ResidentMeter, make_meter, with_highest
from offbeat.trainers.torch.pass_room import PassRoom, largest_tokens

MIB = 2**20


class Script:
    """Answers these peaks, one after another."""

    def __init__(self, *peaks: int, reserved: tuple[int, ...] = ()) -> None:
        self._peaks, self._reserved = list(peaks), list(reserved)

    def start(self) -> None:
        """Nothing to set back."""

    def peak(self) -> int:
        return self._peaks.pop(0)

    def read_reserved(self) -> int | None:
        return self._reserved.pop(0) if self._reserved else None


def work(memory: PeakMemory, *calls: str) -> None:
    for call in calls:
        with memory.during(call):
            pass


def result(**metrics: float) -> StepResult:
    named = {f"memory/{name}": value for name, value in metrics.items()}
    return StepResult(
        applied=True,
        loss=0.5,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=7,
        sequences=3,
        chunks=2,
        metrics={"train/ratio_mean": 1.0, **named},
    )


def test_a_phase_has_the_highest_of_its_calls_and_a_report_begins_anew() -> None:
    memory = PeakMemory(Script(5, 9, 7, 6, 3, 4))
    work(memory, "begin", "microbatch", "microbatch", "finish")
    assert memory.report(1) == {"memory/peak_train_bytes": 9, "memory/peak_finish_bytes": 6}
    work(memory, "publish", "prepare_logprobs")
    assert memory.report(2) == {"memory/peak_publish_bytes": 3, "memory/peak_logprobs_bytes": 4}


def test_what_the_allocator_held_is_the_highest_of_all_phases() -> None:
    memory = PeakMemory(Script(5, 9, reserved=(12, 11)))
    work(memory, "microbatch", "finish")
    assert memory.report(1)["memory/peak_reserved_bytes"] == 12


def test_the_report_of_a_step_that_was_asked_for_again_is_the_same() -> None:
    memory = PeakMemory(Script(5, 6, 7))
    work(memory, "finish")
    first = memory.report("a key")
    work(memory, "finish")
    assert memory.report("a key") == first


def test_a_call_that_raises_counts_and_other_calls_are_not_measured() -> None:
    memory = PeakMemory(Script(5))
    with pytest.raises(ValueError, match="out of memory"), memory.during("microbatch"):
        raise ValueError("out of memory")
    work(memory, "state", "restore", "save")
    assert memory.report(1) == {"memory/peak_train_bytes": 5}


def test_every_phase_is_a_declared_metric() -> None:
    memory = PeakMemory(Script(1, 2, 3, 4, 5))
    work(memory, "prepare_logprobs", "microbatch", "finish", "publish", "checkpoint")
    reported = memory.report(1)
    assert len(reported) == 5
    assert reported.keys() <= METRICS.keys()
    assert {METRICS[name].unit for name in reported} == {"bytes"}


def test_the_highest_of_all_ranks_is_reported_and_the_rest_is_the_first_ranks() -> None:
    ranks = [result(peak_a=5.0, peak_b=9.0), result(peak_a=8.0), result(peak_c=1.0)]
    assert with_highest(ranks) == result(peak_a=8.0, peak_b=9.0, peak_c=1.0)
    assert with_highest(ranks[:1]) == ranks[0]


def test_the_stub_reports_nothing() -> None:
    memory = PeakMemory(make_meter(StubTrainerConfig()))
    work(memory, "microbatch", "finish")
    assert memory.report(1) == {}


def test_memory_that_was_touched_and_given_back_is_seen_in_its_phase_and_not_in_the_next() -> None:
    meter = ResidentMeter()
    meter.start()
    before = meter.peak()
    with mmap.mmap(-1, 64 * MIB) as touched:  # an allocator might give out what is resident already
        for page in range(0, 64 * MIB, mmap.PAGESIZE):
            touched[page] = 1
    assert meter.peak() - before > 60 * MIB
    meter.start()
    assert meter.peak() - before < 30 * MIB


def test_where_the_mark_cannot_be_set_back_it_is_the_highest_since_the_process_began(
    tmp_path: Path,
) -> None:
    (tmp_path / "status").write_text("Name:\ta\nVmHWM:\t    2048 kB\nVmRSS:\t 4 kB\n")
    (tmp_path / "clear_refs").mkdir()  # cannot be written
    meter = ResidentMeter(tmp_path)
    for _ in range(2):
        meter.start()
        assert meter.peak() == 2 * MIB
    elsewhere = ResidentMeter(tmp_path / "no such system")
    elsewhere.start()
    assert elsewhere.peak() > MIB


# --- room for a pass ------------------------------------------------------------------------------


class Cutting:
    """Rows of eight tokens each, cut into microbatches of at most so many tokens."""

    def __init__(self, rows: int) -> None:
        self.rows, self.most = rows, 1000

    def cut_smaller(self, tokens: int) -> None:
        self.most = tokens

    def read(self) -> tuple[int, list[PackedRows]]:
        at_once = max(1, self.most // 8)
        sizes = [min(at_once, self.rows - each) for each in range(0, self.rows, at_once)]
        return self.rows, [pack_rows([list(range(8))] * size) for size in sizes]


def out_of_memory_at(tokens: int) -> PassRoom:
    room = PassRoom(torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError), room.measure_pass(tokens):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return room


def test_microbatches_are_halved_until_they_are_smaller_than_one_that_ran_out_of_memory() -> None:
    cutting = Cutting(16)
    what, microbatches = out_of_memory_at(64).fit(cutting.read, cutting.cut_smaller)
    assert (what, [largest_tokens([each]) for each in microbatches]) == (16, [32] * 4)
    assert len(PassRoom(torch.device("cpu")).fit(Cutting(16).read, cutting.cut_smaller)[1]) == 1


def test_rows_that_cannot_be_cut_further_are_refused_before_a_pass_begins() -> None:
    cutting = Cutting(2)
    with pytest.raises(torch.OutOfMemoryError, match=r"8 tokens has no room.*Lower trainer\."):
        out_of_memory_at(8).fit(cutting.read, cutting.cut_smaller)


def test_a_pass_that_ran_out_of_memory_once_is_refused_once() -> None:
    room, cutting = out_of_memory_at(8), Cutting(2)
    with pytest.raises(torch.OutOfMemoryError):
        room.fit(cutting.read, cutting.cut_smaller)
    assert len(room.fit(cutting.read, cutting.cut_smaller)[1]) == 2


class Gpu:
    """Counters of a device of 800 bytes: weights and moments, gradients of 160, one byte a token."""

    def __init__(self, room_for: int = 400) -> None:
        self.allocated, self.peak = 800 - room_for, 0
        self.room = PassRoom(torch.device("cuda:0"), self)
        self.gradients = 0

    def reset_peak_memory_stats(self, device: torch.device, /) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device, /) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device, /) -> int:
        return self.peak

    def memory_reserved(self, device: torch.device, /) -> int:
        return self.allocated

    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]:
        return 800 - self.allocated, 800

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        assert self.allocated <= 800, "out of memory"

    def begin_step(self) -> None:
        self.allocate(-self.gradients)
        self.gradients = 0
        self.room.begin_step()

    def train(self, cutting: Cutting) -> list[int]:
        """Train on a chunk. Return the tokens of its microbatches."""
        _, microbatches = self.room.fit(cutting.read, cutting.cut_smaller)
        with self.room.measure_pass(largest_tokens(microbatches)):
            for each in microbatches:
                self.allocate(each.input_ids_RT.size)
                self.allocate(-each.input_ids_RT.size)
                self.allocate(160 - self.gradients)
                self.gradients = 160
        return [each.input_ids_RT.size for each in microbatches]


def rows(count: int, at_once: int) -> Cutting:
    cutting = Cutting(count)
    cutting.most = 8 * at_once
    return cutting


def test_gradients_of_the_first_chunk_are_not_counted_again_for_later_chunks_of_the_step() -> None:
    gpu = Gpu(room_for=340)
    for _ in range(2):
        gpu.begin_step()
        assert gpu.train(rows(40, at_once=20)) == [160, 160]
        assert gpu.train(rows(38, at_once=19)) == [152, 152]
        assert gpu.train(rows(20, at_once=20)) == [160]


def test_the_first_chunk_of_a_step_needs_room_for_gradients_from_its_second_microbatch_on() -> None:
    gpu = Gpu()
    gpu.begin_step()
    gpu.train(rows(40, at_once=20))
    gpu.train(rows(40, at_once=20))
    gpu.begin_step()
    gpu.allocate(150)  # as the moments after the first step: 250 are free
    assert gpu.train(rows(20, at_once=20)) == [160]
    gpu.begin_step()
    assert gpu.train(rows(40, at_once=20)) == [80] * 4


def test_rows_that_cannot_be_cut_are_not_refused_because_of_what_another_pass_took() -> None:
    gpu = Gpu()
    gpu.begin_step()
    gpu.train(rows(40, at_once=20))
    gpu.allocate(235)  # 5 are free
    whole = Cutting(1)
    assert len(gpu.room.fit(whole.read, whole.cut_smaller)[1]) == 1
