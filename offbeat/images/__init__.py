"""Option: pictures in prompts, for models with a vision tower. Registered in ``offbeat.doors``.

pictures     the arrays of a prompt's pictures, and their check (numpy)
families     rules of each model family: sizes, tokens in a prompt, positions (numpy)
features     pictures through the vision tower (torch)
plugin       everything that the core asks for
"""
