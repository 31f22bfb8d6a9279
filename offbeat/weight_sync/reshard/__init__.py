"""Plans for weights that go from many sharded senders to many sharded receivers."""
