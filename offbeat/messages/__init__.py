"""What crosses an actor boundary: frozen records and typed failures, and nothing that acts.

The lowest room of the house. Every other folder may import it; it imports none of them, nor ray,
nor torch. Arrays inside a record are numpy.
"""
