"""Everything that is a Ray actor or lives in one, and the adapters that make actors look like ports.

Actors satisfy the Protocols of ``offbeat.controller.ports`` by shape; the two never import each
other.
"""
