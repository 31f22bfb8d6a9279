"""Type of Ray's actor handles in this package."""

from typing import Any

Handle = Any
"""Actor handle, whose methods are those of its class. Ray's own types do not describe a class that
becomes an actor by ``ray.remote(cls)``."""
