"""Stand-ins without a model, and the rules of fakes: dry runs, tests and plug-ins share them."""
