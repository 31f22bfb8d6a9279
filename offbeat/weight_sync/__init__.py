"""From the trainer's weights to the generators': exact, verified, all or nothing."""
