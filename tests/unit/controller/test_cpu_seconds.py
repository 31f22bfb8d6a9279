"""CPU seconds of the processes of a run, by step."""

import itertools

import pytest

from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.state import CpuSeconds
from offbeat.messages.weights import EngineState
from offbeat.messages.worker_report import WorkerReport
from tests.support.virtual_time import run
from tests.support.world import World


def state_of(incarnation: str, cpu_s: float) -> EngineState:
    return EngineState("generator-0", incarnation, 0, "", 0, 0, 0.0, 0, cpu_s=cpu_s)


def test_a_step_has_what_each_process_took_since_the_step_before() -> None:
    engine = EngineRecord("generator-0")
    cpu = CpuSeconds(itertools.count(10.0, 0.5).__next__)
    cpu.worker_reported("a", 5.0)
    engine.account(state_of("x", 7.0))
    assert cpu.lap([engine]) == {}, "their starts are not part of a step"
    for process, cpu_s in (("a", 5.25), ("b", 1.0), ("a", 5.125)):  # the last one is late
        cpu.worker_reported(process, cpu_s)
    engine.account(state_of("x", 8.0))
    assert cpu.lap([engine]) == {
        "cpu/controller_s": 0.5,
        "cpu/workers_s": 1.25,
        "cpu/engines_s": 1.0,
    }


def test_an_engine_that_was_replaced_goes_on_from_what_its_former_process_took() -> None:
    engine = EngineRecord("generator-0")
    engine.account(state_of("x", 7.0))
    engine.reborn("y")
    engine.account(state_of("y", 2.0))
    assert engine.cpu_s == 9.0


def test_the_metrics_of_a_step_have_the_cpu_seconds_since_the_step_before() -> None:
    world = World({"steps": 3}, cpu_s=itertools.count(1.0, 0.25).__next__)
    world.run()
    first, *later = world.telemetry.records
    assert "cpu/controller_s" not in first
    assert [record["cpu/controller_s"] for record in later] == [0.25, 0.25]


def test_a_report_of_a_worker_is_counted_in_the_step_in_which_it_came() -> None:
    async def story() -> dict[str, float]:
        state = World().controller().state
        state.cpu.lap([])
        state.worker_reported(WorkerReport("environment-0-a", cpu_s=3.0))
        return state.cpu.lap([])

    assert run(story())["cpu/workers_s"] == 3.0


def test_processes_that_were_replaced_stay_counted_and_are_not_remembered_for_ever() -> None:
    cpu = CpuSeconds(float)
    cpu.lap([])
    for number in range(20_000):
        cpu.worker_reported(f"environment-0-{number}", 1.0)
        cpu.worker_reported("environment-1-a", number / 1e3)
    assert cpu.lap([])["cpu/workers_s"] == pytest.approx(20_000 + 19.999)
    assert cpu.processes <= 8192
