"""Default environment variables of every process of a run."""

from typing import Final

ENVIRONMENT: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Disable the raylet's messages on dead workers in our terminal: the driver reports them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""Set for this process and its actors before they are read; existing values are kept."""

PRIVATE: Final = {
    # Ray's name for "a private cluster binds to loopback only", on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Additional variables for a private cluster."""
