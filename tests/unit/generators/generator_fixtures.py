"""What the fixtures of this folder are, for the tests' signatures."""

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.messages.generation import GenerateRequest, GenerateResult

MakeModel = Callable[..., PreTrainedModel]
MakeEngine = Callable[..., EmbeddedEngine]
MakeRequest = Callable[..., GenerateRequest]
Finish = Callable[[EmbeddedEngine], dict[str, GenerateResult]]
SamplesOf = Callable[[GenerateResult], list[tuple[list[int], NDArray[np.floating]]]]
RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
