"""Index, schema, codec and spool of the prompt groups between rollouts and training.

Not to be confused with the PyPI package TransferQueue, whose import is a top-level
``transfer_queue``; this one is ``offbeat.transfer_queue``.
"""
