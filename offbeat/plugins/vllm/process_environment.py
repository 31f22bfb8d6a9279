"""Environment variables of an engine's process that vLLM reads."""

import os
from collections.abc import Mapping, MutableMapping

from offbeat.plugins.vllm.section import VllmGeneratorConfig


def environment(config: VllmGeneratorConfig) -> Mapping[str, str]:
    """Return the environment variables to set before vllm is imported; child processes inherit them."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # a model is a directory here
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device != "cpu":
        return quiet
    return {
        **quiet,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is a share of the whole machine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and other engines use the same cores
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def prepare_environment(
    config: VllmGeneratorConfig, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables that are unset: values chosen by the user have precedence."""
    for name, value in environment(config).items():
        environ.setdefault(name, value)
    if config.device == "cpu":
        environ["OMP_NUM_THREADS"] = str(config.threads)  # Ray has set it already, to its CPUs
