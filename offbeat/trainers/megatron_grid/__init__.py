"""A vision tower on ranks of its own, beside language ranks of the megatron trainer.

Builds on ``trainers.grid``, which has the exchange of pictures, and on ``trainers.megatron``. Needs the
extra ``megatron``.

    language    trainer of a language rank: megatron-core's decoder without a tower; choice of a trainer
    encoder     trainer of an encoder rank: the tower, sharded over encoder ranks
    optimizer   state of the tower's optimizer in the form of the language ranks'
"""
