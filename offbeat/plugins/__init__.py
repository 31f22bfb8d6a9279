"""Options of a run, one folder each. The core finds them through ``offbeat.doors``."""
