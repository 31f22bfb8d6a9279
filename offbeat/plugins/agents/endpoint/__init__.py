"""OpenAI-compatible endpoint in front of an engine, which records the tokens that the engine drew.

``session.py`` is one sample: turns, branches, and which tokens are trained. ``chat_bridge.py``
defines how turns are joined without encoding a drawn token again, by a chat template or by a
renderer. ``server.py`` serves HTTP. No Ray, no torch.
"""
