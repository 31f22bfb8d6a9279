"""Index, schema, codec and spool of the prompt groups between rollouts and training.

This is not the PyPI package TransferQueue, which is imported as the top-level ``transfer_queue``.
"""
