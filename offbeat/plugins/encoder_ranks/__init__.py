"""A vision tower on ranks of its own: who holds what, and the features and gradients between them.

Builds on ``trainers.torch``. ``megatron`` has the same sides next to the trainer of ``plugins.megatron``,
and shares all that knows no backend.

plugin          encoder ranks as the core finds them
section         section ``trainer.encoder``
clashes         settings that do not go with encoder ranks
checks          whether a model has two sides, what a rank of each holds, and what they exchange
megatron/       trainers of both sides next to megatron-core
layout          language ranks, encoder ranks, lanes                                        (pure)
provenance      which media a lane reads, by digest                                         (pure)
bridge          messages between two ranks: header, features, gradients
tower_plan      how encoder ranks divide the matrices of a tower, by family
tower_proof     proof of a cut tower at the start; features as one tensor
sides           which tensors of a model are tower or language
exchange        what trainers of both sides share, of any backend: rounds of messages
encoding        trainers of encoder ranks: media of lanes, passes of the tower, gradients
lane            what trainers of language ranks share: features that come, gradients that go back
weights         mesh of a side, whole weights from both, loading
loading         makes the side of a model that a torch rank holds: cut, and proved
trainer         what both sides share next to the torch trainer: checkpoints
rank_bytes      bytes of the largest rank of each side, before anything is loaded
choose          trainers of both sides next to the torch trainer, and the class of a rank
errors          typed failures
"""
