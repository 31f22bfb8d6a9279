"""Reports a run: metrics, sinks, logs, live display, final report.

Telemetry makes no decisions and cannot stop a run: it counts and logs its failures.
``metrics.jsonl`` is the complete record. Every other sink receives the same records. Needs neither
Ray nor torch.
"""
