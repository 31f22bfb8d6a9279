"""Option: pictures in prompts, for models with a vision tower. Registered in ``offbeat.doors``.

pictures      the arrays of a prompt's pictures, and their check (numpy)
families      rules of each model family: sizes, tokens in a prompt, positions (numpy)
features      pictures through the vision tower (torch)
model_tokens  tokens that represent pictures, in a model directory
section       keys of ``environment.images``
rows          pictures that a row of a data file names
decoding      bytes to pixels, within limits
processors    image processors of the model families
encoder       prompt with pictures to token ids and arrays, in a thread
digits        built-in task: a digit in a drawn picture
thumbnails    small copies, and sizes in pixels
logged_pictures  what these files say of a group
prompt_check  findings of ``offbeat check``
plugin        everything that the core asks for
"""
