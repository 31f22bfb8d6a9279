"""Index, schema, codec and spool of the prompt groups between rollouts and training.

Not to be confused with the PyPI package TransferQueue. That one is imported as the top-level
``transfer_queue``, this one as ``offbeat.transfer_queue``.
"""
