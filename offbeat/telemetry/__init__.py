"""Reports a run: metrics, sinks, logs, live display, final report.

Telemetry takes no decisions and cannot stop a run: failures are counted and logged.
``metrics.jsonl`` is the complete record; every other sink gets the same records. Needs neither Ray
nor torch.
"""
