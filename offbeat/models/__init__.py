"""Models: their files, their media, and proofs that passes compute the model's definition.

The reference of the proof is transformers' own forward pass: attention ``eager``, one row without
padding, no cache. Trainer and embedded engine compare their packed, padded and cached passes with
it, on the loaded model and on a tiny model of its class.

Encoder features enter a forward pass only at the placeholder tokens of a prompt. A placeholder id
that a policy samples is an ordinary token. transformers' own forward pass would write features
there, or fail. So the forward pass gets only token ids, and a hook on the embedding writes the
features into its output.

loading         a model from its files, with exactly its weights
plain           the reference, and the distance from it that rounding can explain
tiny_model      a small random model of the same class, with short windows
media_rules     interface of media: sizes, tokens in a prompt, positions, encoder (numpy)
media_placing   media of the prompts of a forward pass, and their positions in its rows (numpy)
media_passes    features of media, written into a forward pass
media_canaries  canary prompts that use the encoder
media_prompts   random prompts with media
"""
