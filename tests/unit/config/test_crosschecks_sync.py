"""Settings of the weight sync that cannot work together."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig

BFLOAT16: dict[str, Any] = {"model": {"path": "tiny", "dtype": "bfloat16"}}


def messages(sync: dict[str, Any], **model: str) -> list[str]:
    values: dict[str, Any] = {"steps": 2, "model": {"path": "tiny"} | model, "sync": sync}
    found = clashes(RunConfig.model_validate(values))
    return [f"{clash.message}. {clash.hint}" for clash in found]


def test_embedded_engines_serve_the_type_of_the_model() -> None:
    (text,) = messages({"wire_dtype": "bfloat16"})
    assert "sync.wire_dtype=bfloat16 does not fit generator.backend=embedded" in text
    assert messages({"wire_dtype": "float32"}) == []
    assert messages({"wire_dtype": "bfloat16"}, dtype="bfloat16") == []


@pytest.mark.plugins
@pytest.mark.parametrize("key", ["quantization", "hf_overrides", "load_format"])
def test_what_quantize_sets_of_vllm_is_set_once(key: str) -> None:
    vllm = {"backend": "vllm", "vllm": {"engine_args": {key: "x"}}}
    (text,) = adapters(sync={"quantize": "fp8_block"}, generator=vllm, **BFLOAT16)
    assert f"sets {key} of vLLM" in text


@pytest.mark.plugins
def test_other_quantizations_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="fp8_block"):
        messages({"quantize": "mxfp8"})


@pytest.mark.parametrize("transport", ["nccl", ""])
def test_a_transport_that_does_not_exist_is_refused(transport: str) -> None:
    with pytest.raises(ValueError, match="object_store"):
        messages({"transport": transport})


def adapters(**values: Any) -> list[str]:
    given: dict[str, Any] = {"steps": 2, "model": {"path": "tiny"}} | values
    return [f"{each.message}. {each.hint}" for each in clashes(RunConfig.model_validate(given))]


def test_a_merged_release_without_adapters_is_refused() -> None:
    (text,) = adapters(sync={"adapter": "merged"})
    assert "sync.adapter=merged has nothing to merge" in text and "Leave sync.adapter out" in text


@pytest.mark.plugins
def test_a_merged_release_needs_adapters_to_merge() -> None:
    (text,) = adapters(sync={"adapter": "merged"})
    assert text.endswith("Leave sync.adapter out, or set trainer.lora.")
    assert adapters(sync={"adapter": "merged"}, trainer={"lora": {}}) == []
    assert adapters(trainer={"lora": {}}) == []


@pytest.mark.plugins
def test_releases_of_adapters_fit_every_kind_of_engine() -> None:
    for generator in ({"backend": "vllm"}, {"backend": "embedded"}):
        for adapter in ("separate", "merged"):
            given: dict[str, Any] = {"generator": generator, "sync": {"adapter": adapter}}
            assert adapters(trainer={"lora": {}}, **given) == []


@pytest.mark.plugins
def test_adapters_on_megatron_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"trainer\.megatron\.lora"):
        adapters(trainer={"backend": "megatron", "lora": {}})
