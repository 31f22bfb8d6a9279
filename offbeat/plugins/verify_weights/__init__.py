"""``offbeat verify-weights``: finds the first weight that differs between checkpoint and engine."""
