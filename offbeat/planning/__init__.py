"""Plans and measurements before a run: what a weight sync would move, what a trainer costs. Without Ray."""
