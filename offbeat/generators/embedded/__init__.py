"""An inference engine for any Hugging Face causal LM, in this process, on CPU or GPU.

``engine.py`` schedules; ``model.py`` runs the two forward passes; ``cache.py`` holds keys and
values; ``rows.py`` and ``sampling.py`` draw tokens; ``versions.py`` stamps them. No ray, no asyncio.
"""
