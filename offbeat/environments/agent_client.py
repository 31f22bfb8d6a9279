"""The model, as an agent is given it."""

import msgspec


class AgentClient(msgspec.Struct, frozen=True):
    """Address of the model for one sample: what any OpenAI client is created with.

    Requests with ``api_key`` are recorded as turns of this sample. The key ends with the sample.
    """

    base_url: str
    api_key: str
    model: str

    def __repr__(self) -> str:
        return f"AgentClient(base_url={self.base_url!r}, model={self.model!r})"  # never the key
