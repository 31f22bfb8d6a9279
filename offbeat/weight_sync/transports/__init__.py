"""The ways weights travel: a module each, all of them behind ``offbeat.weight_sync.transport``."""
