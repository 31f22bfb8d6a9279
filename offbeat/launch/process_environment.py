"""Environment variables that every process of a run has, unless they are set already."""

from typing import Final

ENVIRONMENT: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The raylet's news of dead workers, which Ray prints into our terminal: we name them ourselves.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""Set for this process and its actors before anything reads them; what is set already stays."""

PRIVATE: Final = {
    # Ray's name for "a private cluster binds to loopback only", on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Set as well for a cluster that the run has alone."""
