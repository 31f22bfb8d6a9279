"""Ray actor classes, and the adapters that implement the controller's ports.

Actors satisfy the Protocols of ``offbeat.controller.ports`` by shape. Neither side imports the
other.
"""
