"""Image-text models: all that they have beyond causal language models, for trainers and engines.

A picture enters a model at the placeholder tokens of its prompt: there, and nowhere else, the
features of the vision tower stand in the place of the embedding. A placeholder id that a policy
samples is an ordinary token; transformers' own forward pass would put features there, or fail. So the
forward pass gets token ids alone, and a hook behind the embedding writes the features.

auto_class       transformers' class of a model, by its config
picture_rules    what a family demands of pictures: sizes, tokens in a prompt, positions (numpy)
picture_tokens   tokens that represent pictures, and a text that holds one by itself
model_tokens     finds them in a model directory
placing          pictures of the prompts of a forward pass, and their positions in its rows (numpy)
canary_pictures  canary prompts that reach the vision tower
tower            features of pictures, written into a forward pass
"""
