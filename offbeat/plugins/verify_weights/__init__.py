"""``offbeat verify-weights``: which weight differs first between a checkpoint and the engines."""
