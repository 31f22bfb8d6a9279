"""Vision tower on separate ranks, next to language ranks of the megatron trainer.

Builds on ``plugins.encoder_ranks``, which exchanges features, and on ``plugins.megatron``. Needs
the extra ``megatron``.

    language    side of a language rank: megatron-core's decoder without a tower
    encoder     trainer of an encoder rank: the tower, sharded over encoder ranks
"""
