"""Stand-ins for trainer and engine without a model: dry runs, tests and plug-ins share them."""
