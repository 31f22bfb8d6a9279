"""Finds settings that releases in float8 blocks cannot work with."""

from collections.abc import Iterator

from offbeat.config.engine_plugin import known_engines
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig


def float8_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield quantized releases that no engine of the recipe can load."""
    scheme, generator = config.sync.quantize, config.generator
    served = config.sync.wire_dtype or config.model.dtype
    is_16_bit = served in ("bfloat16", "float16")
    if not generator.takes_quantized:
        and_wire = "" if is_16_bit else " and sync.wire_dtype to bfloat16"
        yield Clash(
            ("sync.quantize", "generator.backend"),
            f"sync.quantize={scheme} does not fit generator.backend={generator.backend}, which computes with "
            "no quantized weights",
            f"Leave sync.quantize out{_or_quantized_engines(and_wire)}.",
        )
    if generator.takes_quantized and not is_16_bit:
        yield Clash(
            ("sync.quantize", "sync.wire_dtype", "model.dtype"),
            f"sync.quantize={scheme} needs engines that compute in 16 bits, and they serve {served}",
            "Set sync.wire_dtype to bfloat16.",
        )


def _or_quantized_engines(and_wire: str) -> str:
    """Return the advice to use engines that load quantized weights, or nothing if none exist."""
    names = [name for name, each in known_engines().items() if each.section.takes_quantized]
    return f", or set generator.backend to {' or '.join(names)}{and_wire}" if names else ""
