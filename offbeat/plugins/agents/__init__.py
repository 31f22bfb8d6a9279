"""Agents: code of a user that calls the model over HTTP, and the endpoint that answers it."""
