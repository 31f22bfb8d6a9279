"""Ray's actor handles, as this package types them."""

from typing import Any

Handle = Any
"""A handle's methods are those of its class, found when called; Ray's own types do not describe
that for a class that becomes an actor by ``ray.remote(cls)``.
"""
