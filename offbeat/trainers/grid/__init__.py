"""A vision tower on ranks of its own: who holds what, and the features and gradients between them.

Builds on ``trainers.torch``; nothing there but ``choose`` knows this room. ``trainers.megatron_grid`` has
the same sides beside megatron-core, and shares all that knows no backend.

layout          language ranks, encoder ranks, lanes                                        (pure)
provenance      which media a lane reads, by digest                                         (pure)
bridge          messages between two ranks: header, features, gradients
tower_plan      how encoder ranks divide the matrices of a tower, by family
tower_proof     proof of a cut tower at the start
sides           which tensors of a model are tower or language; drops the other side's modules
stacking        features as one tensor; a picture for a pass that no prompt needs
exchange        what trainers of both sides share, of any backend: rounds of messages
tower_passes    forward and backward passes over them, with one graph in memory at a time
encoding        what trainers of encoder ranks share: media of lanes, and their gradients
lane            what trainers of language ranks share: features that come, gradients that go back
weights         mesh of a side, whole weights from both, loading
trainer         what both sides share beside the torch trainer: the cut, its proof, checkpoints
encoder         trainer of an encoder rank beside the torch trainer
language        trainer of a language rank of the torch trainer
rank_bytes      bytes of the largest rank of each side, before anything is loaded
choose          class of a rank's trainer
errors          typed failures
"""
