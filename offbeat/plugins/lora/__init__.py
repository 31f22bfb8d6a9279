"""Low-rank adapters: trains them, sends them, and adds them to the weights of engines."""
