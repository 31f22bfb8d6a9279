"""Settings that need copies of the weights."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig
from offbeat.launch.dry_run import dry

SHARED: dict[str, Any] = {
    "steps": 2,
    "model": {"path": "tiny"},
    "runtime": {"backend": "local"},
    "generator": {"share_weights": True},
    "sampler": {"name": "in_order", "max_staleness": 0},
}


def config(**sections: dict[str, Any]) -> RunConfig:
    merged = {name: {**SHARED.get(name, {}), **each} for name, each in sections.items()}
    return RunConfig.model_validate({**SHARED, **merged})


def messages(of: RunConfig, *, dry_run: bool = False) -> list[str]:
    return [f"{clash.message}. {clash.hint}" for clash in clashes(of, dry_run=dry_run)]


def test_one_copy_works_with_one_process_without_staleness_and_several_engines() -> None:
    assert messages(config()) == []
    assert messages(config(generator={"engines": 3})) == []
    assert messages(config(sync={"mode": "drain"}, trainer={"freeze": ["*embed*"]})) == []


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("sections", "key", "reason", "fix"),
    [
        (
            {"runtime": {"backend": "ray"}},
            "runtime.backend=ray",
            "each with its own memory",
            "Set runtime.backend to local",
        ),
        (
            {"sampler": {"max_staleness": 1}},
            "sampler.max_staleness=1",
            "decoding and optimizer steps alternate",
            "Set sampler.max_staleness to 0",
        ),
        (
            {"sync": {"delta": True}},
            "sync.delta",
            "no weights are sent",
            "Set sync.delta to false",
        ),
        (
            {"trainer": {"lora": {}}},
            "trainer.lora",
            "needs unmerged",
            "Leave trainer.lora out",
        ),
        (
            {"environment": {"name": "digits", "images": {"max_mib": 0.02}}},
            "environment.images",
            "untested with media",
            "Train on text prompts",
        ),
    ],
)
def test_what_needs_copies_is_refused_with_reason_and_fix(
    sections: dict[str, Any], key: str, reason: str, fix: str
) -> None:
    (text,) = [each for each in messages(config(**sections)) if "share_weights" in each]
    assert text.startswith(f"generator.share_weights cannot work with {key}: ")
    assert reason in text
    assert text.endswith(f"{fix}, or set generator.share_weights to false.")


def test_one_copy_is_on_one_device() -> None:
    found = messages(config(trainer={"device": "cuda", "gpus": 1.0}))
    (text,) = [each for each in found if "share_weights" in each]
    assert "trainer.device=cuda, but generator.device=cpu" in text


@pytest.mark.plugins
@pytest.mark.parametrize(
    "sections",
    [
        {"sync": {"wire_dtype": "bfloat16"}},
        {"sync": {"quantize": "fp8_block"}},
        {"sync": {"transport": "reshard"}},
        {"trainer": {"data_parallel": 2}},
    ],
)
def test_what_embedded_engines_or_one_process_refuse_is_refused(sections: dict[str, Any]) -> None:
    assert messages(config(**sections))


def test_a_dry_run_has_no_weights_to_share() -> None:
    stubs = dry(config())
    assert "share_weights" not in stubs.generator.model_dump()
    assert messages(stubs, dry_run=True) == []
