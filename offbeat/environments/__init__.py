"""Environments: the protocol, prompt sources, built-in tasks and killable user rewards.

Nothing here imports ray, torch or transformers: the worker passes a tokenizer in, and the
controller uses ``prompts`` alone. User reward code runs in child processes that can be killed.
"""
