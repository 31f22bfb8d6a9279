"""Startup proofs that a way of running a model computes what the model defines.

The reference is transformers' own forward pass: attention ``eager``, one row without padding, no
cache. Trainer and embedded engine compare their packed, padded and cached passes with it, on the
loaded model and on a tiny model of its class.

loading        a model from its files, all of its weights and no others
media_prompts  random prompts with media
plain          the reference, and the distance from it that rounding explains
rope           rotary frequencies that do not depend on the length of a batch
tiny_model     a small random model of the same class, with short windows
"""
