"""Stand-ins without a model, and rules of fakes, for dry runs, tests and plug-ins."""
