"""Media in a model: the interface that options implement, and the code that is alike for all media.

Features of an encoder enter a forward pass at the placeholder tokens of a prompt and nowhere else. A
placeholder id that a policy samples is an ordinary token; transformers' own forward pass would put
features there, or fail. So the forward pass gets only token ids, and a hook behind the embedding
writes the features.

auto_class     transformers' class of a model, by its config
rules          interface: sizes, tokens in a prompt, positions, encoder (numpy)
prompt_tokens  tokens that represent media, and a text that holds one by itself
placing        media of the prompts of a forward pass, and their positions in its rows (numpy)
canaries       canary prompts that reach the encoder
passes         features of media, written into a forward pass
"""
