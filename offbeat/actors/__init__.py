"""Ray actor classes, and the adapters that implement the controller's ports.

Actors satisfy the Protocols of ``offbeat.controller.ports`` by shape; the two never import each
other.
"""
