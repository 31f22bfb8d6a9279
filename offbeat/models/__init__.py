"""Models: their files, the proof that a way of running one computes what it defines, their media.

The reference of the proof is transformers' own forward pass: attention ``eager``, one row without
padding, no cache. Trainer and embedded engine compare their packed, padded and cached passes with
it, on the loaded model and on a tiny model of its class.

Features of an encoder enter a forward pass at the placeholder tokens of a prompt and nowhere else. A
placeholder id that a policy samples is an ordinary token; transformers' own forward pass would put
features there, or fail. So the forward pass gets only token ids, and a hook behind the embedding
writes the features.

loading         a model from its files, all of its weights and no others
plain           the reference, and the distance from it that rounding explains
tiny_model      a small random model of the same class, with short windows
media_rules     interface of media: sizes, tokens in a prompt, positions, encoder (numpy)
media_placing   media of the prompts of a forward pass, and their positions in its rows (numpy)
media_passes    features of media, written into a forward pass
media_canaries  canary prompts that reach the encoder
media_prompts   random prompts with media
"""
