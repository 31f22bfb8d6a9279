"""vLLM as a kind of engine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.config.problems import Clash
from offbeat.doors import find_plugins
from offbeat.messages.finding import Finding
from offbeat.plugins.vllm.section import VllmGeneratorConfig

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig


class VllmPlugin(EnginePlugin):
    """Serves a model with vLLM, which needs a separate environment."""

    section = VllmGeneratorConfig
    needs_ray_because = "vLLM starts processes and patches torch in its own"
    variable_prefixes = ("VLLM_",)

    def server_class(self) -> type[Any]:
        """Return the class of an engine's server."""
        from offbeat.plugins.vllm.server import VllmEngineServer

        return VllmEngineServer

    def actor_class(self) -> type[Any]:
        """Return the class of an engine's Ray actor, which tells the server where to log."""
        from offbeat.plugins.vllm.engine_actor import VllmEngineActor

        return VllmEngineActor

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield arguments of vLLM that do not fit the recipe."""
        from offbeat.plugins.vllm.checks import vllm_clashes

        yield from vllm_clashes(config)

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Check that vLLM is installed, and knows the arguments of the recipe."""
        from offbeat.plugins.vllm.checks import check_vllm

        yield from check_vllm(config)

    def check_weight_sync(self, config: "RunConfig") -> Iterator[Finding]:
        """Report which weights the workers of an engine fetch from the trainer ranks."""
        from offbeat.plugins.vllm.checks import check_vllm_sync

        yield from check_vllm_sync(config)

    def check_model(self, config: "RunConfig") -> Iterator[Finding]:
        """Check that vLLM computes the model as the trainer does, and can load its weights."""
        from offbeat.plugins.vllm.checks import check_vllm_model

        yield from check_vllm_model(config)
        if "fp8_block" in find_plugins(
            "wire_format"
        ):  # the option knows which pairs of formats fit
            from offbeat.plugins.vllm.precision_check import check_precision

            yield from check_precision(config)


ENGINE: Final = VllmPlugin()
