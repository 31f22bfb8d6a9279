"""An inference engine for any Hugging Face causal LM, in this process, on CPU or GPU.

``engine.py`` schedules and stamps tokens with versions; ``model.py`` runs the two forward passes;
``cache.py`` holds keys and values; ``rows.py`` draws tokens. These know no asyncio. ``server.py``
loads weight releases and answers calls. No ray.
"""
