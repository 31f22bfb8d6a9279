"""Clients of the queue service: one for an event loop, one that blocks."""
