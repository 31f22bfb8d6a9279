"""Ray actor classes, and the adapters that implement the controller's ports.

Actors have the methods of the Protocols in ``offbeat.controller.ports``. Neither side imports the
other.
"""
