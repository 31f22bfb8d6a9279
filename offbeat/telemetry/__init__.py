"""Reports a run: metrics, sinks, logs, the display while it runs, the report after.

Nothing here decides anything, and nothing here can stop a run: what fails is counted and logged.
``metrics.jsonl`` is the truth; every other sink shows the same records. Needs neither Ray nor torch.
"""
