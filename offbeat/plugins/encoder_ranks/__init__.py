"""A vision tower on ranks of its own: who holds what, and the features and gradients between them.

Builds on ``trainers.torch``. ``megatron`` has the same sides next to the trainer of ``plugins.megatron``,
and shares all that knows no backend.

plugin          encoder ranks as the core finds them
section         section ``trainer.encoder``
clashes         settings that do not go with encoder ranks
checks          whether a model has two sides, what a rank of each holds, and what they exchange
megatron/       both sides next to megatron-core
layout          language ranks, encoder ranks, lanes                                        (pure)
bridge          messages between two ranks: header, features, gradients
tower_plan      how encoder ranks divide the matrices of a tower, by family
tower_proof     proof of a cut tower at the start; features as one tensor
sides           which tensors of a model are tower or language
encoding        passes of encoder ranks: media of lanes, the tower, gradients
lane            passes of language ranks: features that come, gradients that go back
loading         makes the side of a model that a torch rank holds: cut, and proved
torch_parts     parts of the torch trainer that differ on both sides: passes and checkpoints
errors          typed failures
"""
