"""megatron-core as a backend of the trainer."""
