"""Settings that do not go together with releases in float8 blocks."""

from typing import Any

from tests.support.recipes import make_config, read_clashes

BFLOAT16: dict[str, Any] = {"model": {"path": "tiny", "dtype": "bfloat16"}}


def messages(**sections: Any) -> list[str]:
    return read_clashes(make_config(**sections))


def test_quantized_releases_are_for_engines_that_compute_with_them() -> None:
    (text,) = messages(sync={"quantize": "fp8_block"}, **BFLOAT16)
    assert "sync.quantize=fp8_block does not fit generator.backend=embedded" in text
    assert "or set generator.backend to vllm." in text
    vllm = {"backend": "vllm"}
    assert messages(sync={"quantize": "fp8_block"}, generator=vllm, **BFLOAT16) == []
    (text,) = messages(sync={"quantize": "fp8_block"}, generator=vllm)
    assert "they serve float32. Set sync.wire_dtype to bfloat16" in text
    both = {"quantize": "fp8_block", "wire_dtype": "bfloat16"}
    assert messages(sync=both, generator=vllm) == []
    (text,) = messages(sync=both, generator=vllm, trainer={"lora": {}})
    assert "trainer.lora sends unrounded" in text


def test_quantized_releases_for_embedded_engines_are_one_problem_whose_fixes_work() -> None:
    (text,) = messages(sync={"quantize": "fp8_block"})
    assert (
        "Leave sync.quantize out, or set generator.backend to vllm and sync.wire_dtype to bfloat16."
        in text
    )
    assert messages() == []
    fixed = {"quantize": "fp8_block", "wire_dtype": "bfloat16"}
    assert messages(sync=fixed, generator={"backend": "vllm"}) == []
