"""Settings that deltas refuse, and what ``offbeat check`` says of them."""

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig
from offbeat.launch.checks.report import check_weight_sync
from offbeat.messages.finding import Level
from tests.support.recipes import get_only, make_config


def test_deltas_are_announced_and_warned_of_where_a_step_changes_most_values() -> None:
    assert (
        "nearly every one"
        in get_only(check_weight_sync(make_config(sync={"delta": True}), {})).message
    )
    served = {"path": "x", "dtype": "bfloat16"}
    finding = get_only(check_weight_sync(make_config(sync={"delta": True}, model=served), {}))
    assert finding.level is Level.OK
    assert "the others the full release" in finding.message
    noisy = {"backend": "torch", "optimizer": {"rounding": "stochastic"}}
    finding = get_only(
        check_weight_sync(make_config(sync={"delta": True}, model=served, trainer=noisy), {})
    )
    assert finding.level is Level.WARNING
    assert "each step changes about a third of the values" in finding.message
    assert "set trainer.optimizer.rounding to nearest" in finding.fix


BFLOAT16 = {"path": "x", "dtype": "bfloat16"}
FLOAT32 = {"path": "x", "dtype": "float32"}


@pytest.mark.parametrize(
    ("backend", "wire", "fix", "fixed"),
    [
        ("embedded", None, "Set model.dtype to bfloat16 (embedded", (BFLOAT16, None)),
        (
            "embedded",
            "float32",
            "Set model.dtype to bfloat16 and sync.wire_dtype to null (",
            (BFLOAT16, None),
        ),
        ("vllm", None, "Set sync.wire_dtype or model.dtype to bfloat16,", (BFLOAT16, None)),
        ("vllm", None, "Set sync.wire_dtype or model.dtype to bfloat16,", (FLOAT32, "bfloat16")),
        ("vllm", "float32", "Set sync.wire_dtype to bfloat16,", (FLOAT32, "bfloat16")),
    ],
)
def test_16_bit_weights_are_advised_with_keys_that_the_engines_accept(
    backend: str, wire: str | None, fix: str, fixed: tuple[dict[str, str], str | None]
) -> None:
    def of(model: dict[str, str], wire: str | None) -> RunConfig:
        sync = {"delta": True, "wire_dtype": wire}
        return make_config(sync=sync, generator={"backend": backend}, model=model)

    assert get_only(check_weight_sync(of(FLOAT32, wire), {})).fix.startswith(fix)
    assert list(clashes(of(*fixed))) == []
    assert get_only(check_weight_sync(of(*fixed), {})).level is Level.OK


def test_deltas_are_refused_of_adapters() -> None:
    assert list(clashes(make_config(sync={"delta": True}))) == []
    (clash,) = clashes(make_config(sync={"delta": True}, trainer={"lora": {}}))
    assert "sync.delta=true saves nothing with trainer.lora" in clash.message
