"""Vision tower on separate ranks: tensors of each rank, and exchange of features and gradients.

Builds on ``trainers.torch``. ``megatron`` has the same sides for the trainer of
``plugins.megatron``, and shares all code that does not depend on a backend.

plugin          plug-in of encoder ranks
clashes         settings that do not work with encoder ranks
checks          whether a model has two sides, bytes per rank of each side, and traffic
megatron/       both sides next to megatron-core
layout          language ranks, encoder ranks, lanes                                        (pure)
bridge          messages between two ranks: header, features, gradients
tower_plan      how encoder ranks divide the matrices of a tower, by family
tower_proof     proof of a cut tower at the start; features as one tensor
sides           side of each tensor of a model: tower or language
encoding        passes of encoder ranks: media of lanes, the tower, gradients
lane            passes of language ranks: features received, gradients sent back
loading         loads the side of a model that a torch rank holds: cut, and proved
torch_parts     parts of the torch trainer that differ on both sides: passes and checkpoints
errors          typed failures
"""
