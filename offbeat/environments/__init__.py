"""Environments: the protocol, prompt sources, built-in tasks and killable user rewards.

No module here imports ray or torch. transformers is imported only when ``load_tokenizer`` is
called. The controller uses only ``prompts``. User reward code runs in child processes that can be
killed.
"""
