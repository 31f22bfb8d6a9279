"""An OpenAI-compatible endpoint in front of an engine, which records what the engine drew.

``session.py`` is one sample: turns, branches, what is trained of them. ``template_bridge.py`` joins
turns without encoding a drawn token again. ``server.py`` speaks HTTP. No Ray, no torch.
"""
