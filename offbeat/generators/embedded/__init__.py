"""Inference engine for any Hugging Face causal LM, in this process, on CPU or GPU.

``engine.py`` schedules and stamps tokens with versions. ``model.py`` runs the two forward passes,
``cache.py`` holds keys and values, and ``rows.py`` draws tokens. These do not use asyncio.
``server.py`` loads weight releases and answers calls. No ray.
"""
