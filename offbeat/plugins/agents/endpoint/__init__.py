"""An OpenAI-compatible endpoint in front of an engine, which records what the engine drew.

``session.py`` is one sample: turns, branches, what is trained of them. ``chat_bridge.py`` says
how turns are joined without encoding a drawn token again, by a chat template or by a renderer.
``server.py`` serves HTTP. No Ray, no torch.
"""
