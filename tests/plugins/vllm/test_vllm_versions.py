"""What an engine's start says about the version of vLLM; vLLM itself is not needed."""

import pytest
from structlog.testing import capture_logs

from offbeat.plugins.vllm.server import warn_of_version


@pytest.mark.parametrize("version", ["0.31.0", "0.32.4.dev1+cpu", "unknown"])
def test_an_engine_with_a_tested_vllm_or_a_custom_build_starts_without_a_warning(
    version: str,
) -> None:
    with capture_logs() as log:
        warn_of_version(version)
    assert log == []


@pytest.mark.parametrize("version", ["0.30.2", "0.33.0", "1.0.0"])
def test_an_engine_with_an_untested_vllm_starts_with_a_named_warning(version: str) -> None:
    with capture_logs() as log:
        warn_of_version(version)
    (line,) = log
    assert (line["event"], line["log_level"]) == ("vllm.untested_version", "warning")
    assert (line["version"], line["tested"]) == (version, ("0.31", "0.32"))
