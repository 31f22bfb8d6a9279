"""Agents: user code that calls the model over HTTP, and the endpoint that answers it."""
