"""Turns a prompt and a model into rewarded samples: the protocol, prompt sources, built-in tasks.

Nothing here imports ray, torch or transformers: a tokenizer is handed in by the worker, and the
controller uses ``prompts`` alone. User reward code runs in child processes that can be killed.
"""
