"""Settings of the engines that cannot work together."""

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig


def test_a_run_that_requires_more_engines_than_it_has_is_refused() -> None:
    config = RunConfig.model_validate(
        {"steps": 1, "model": {"path": "none"}, "generator": {"engines": 2, "min_engines": 3}}
    )
    found = [f"{clash.message}. {clash.hint}" for clash in clashes(config)]
    assert found[0] == (
        "generator.min_engines=3 is more than generator.engines=2: the run has fewer engines than it "
        "may go on with. Set generator.min_engines to 2 or less, or generator.engines to 3 or more."
    )
