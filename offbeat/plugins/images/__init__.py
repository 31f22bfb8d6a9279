"""Option: pictures in prompts, for models with a vision tower. Registered in ``offbeat.doors``.

pictures      arrays of a prompt's pictures, and their check (numpy)
families      rules of each model family: sizes, tokens in a prompt, positions (numpy)
features      features of pictures from the vision tower (torch)
model_tokens  tokens that represent pictures, in a model directory
section       keys of ``environment.images``
rows          pictures that a row of a data file names
decoding      bytes to pixels, within limits
processors    image processors of the model families
encoder       prompt with pictures to token ids and arrays, in a thread
digits        built-in task: a digit in a drawn picture
thumbnails    small copies, and sizes in pixels
logged_pictures  pictures of a group in the rollout files
prompt_check  findings of ``offbeat check``
plugin        interface to the core
"""
