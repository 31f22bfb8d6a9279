"""Working stand-ins for the outside world, and a clock that waits for nothing."""
