"""Creates the bridge that a recipe selects: by the model's chat template, or by a renderer."""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# renderers is an extra, and unknown if it is not installed.

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import msgspec

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.doors import is_installed
from offbeat.environments.factory import BadEnvironment
from offbeat.environments.text import UnreadByTemplate, for_template, template_options
from offbeat.plugins.agents.endpoint.chat import NO_VARIABLES, ChatMessage, Tools
from offbeat.plugins.agents.endpoint.chat_bridge import ChatBridge, TemplateRefused
from offbeat.plugins.agents.endpoint.renderer_bridge import RendererBridge
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge


class TokenizerTemplate:
    """``ChatTemplate`` of a tokenizer's own template."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - a fast one of transformers
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # unlike its wrapper, it never changes

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        variables: str = NO_VARIABLES,
        *,
        opens_answer: bool,
    ) -> str:
        given: dict[str, Any] = {"chat_template_kwargs": variables}
        given["tools"] = [msgspec.json.decode(tool) for tool in tools]
        try:
            return self._tokenizer.apply_chat_template(
                for_template([message.for_template() for message in messages], self._tokenizer),
                add_generation_prompt=opens_answer,
                tokenize=False,
                **template_options(given, self._tokenizer),
            )
        except (jinja2.TemplateError, TypeError, RecursionError, UnreadByTemplate) as error:
            raise TemplateRefused(str(error)) from error

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def end_texts(self, end_ids: Sequence[int]) -> dict[int, str]:
        """Return the text of the tokens that end a turn."""
        return {id_: self.decode([id_]) for id_ in end_ids}


_KEY: Final = "environment.renderer"
_GENERIC: Final = "DefaultRenderer"


def bridge_renderer(environment: EnvironmentConfig) -> Mapping[str, Any]:
    """Return the options of the renderer for the endpoint's bridge.

    None if the agent renders messages itself and sends tokens to the endpoint.
    """
    return {} if environment.renders_messages else environment.renderer


def make_bridge(
    tokenizer: Any,  # noqa: ANN401 - of transformers
    renderer: Mapping[str, Any],
    end_ids: Sequence[int],
) -> ChatBridge:
    """Return the bridge of all samples of a model.

    Args:
        tokenizer: The model's fast tokenizer.
        renderer: As ``bridge_renderer`` returns it. Empty: use the tokenizer's chat template.
        end_ids: The tokens that end a turn.

    Raises:
        BadEnvironment: The tokenizer has no chat template, or ``make_renderer`` raises.
    """
    template = TokenizerTemplate(tokenizer)
    if renderer:
        return RendererBridge(make_renderer(tokenizer, renderer), template)
    if not tokenizer.chat_template:
        problem = (
            "an agent needs a tokenizer with a chat template, but this one has none; add "
            f"chat_template.jinja to the model, or name the renderer of its family in {_KEY}"
        )
        raise BadEnvironment("model.path", problem)
    return TemplateBridge(template, template.end_texts(end_ids))


def make_renderer(
    tokenizer: Any,  # noqa: ANN401 - of transformers
    options: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - a renderer of renderers
    """Return the renderer that these options name.

    Raises:
        BadEnvironment: The library is not installed, has no such renderer, or the renderer does not
            fit the tokenizer or continues no conversation.
    """
    if not is_installed("renderers"):
        problem = "the package renderers is not installed: pip install 'offbeat[renderers]'"
        raise BadEnvironment(_KEY, problem)
    from pydantic import TypeAdapter  # noqa: PLC0415 - with the extra, which takes a second
    from renderers import RendererConfig, create_renderer  # noqa: PLC0415

    try:
        config: Any = TypeAdapter(RendererConfig).validate_python(dict(options))
        made: Any = create_renderer(tokenizer, config)
    except (ValueError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        raise BadEnvironment(_KEY, f"{dict(options)}: {error}") from error
    if type(made).__name__ == _GENERIC:
        problem = (
            f"{dict(options)} is its {_GENERIC}, which continues no conversation, so that each turn "
            "would be a branch: name the renderer of the model's family, as in {name: qwen3} (a "
            "directory is not known by its name), or leave it out for the chat template"
        )
        raise BadEnvironment(_KEY, problem)
    return made
