"""Transports of weights, one module each, behind ``offbeat.weight_sync.transport``."""
