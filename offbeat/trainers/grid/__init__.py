"""A vision tower on ranks of its own: who holds what, and the features and gradients between them.

Builds on ``trainers.torch``; nothing there but ``choose`` knows this room.

layout          language ranks, encoder ranks, lanes                                        (pure)
provenance      which pictures a lane reads, by digest; merging those of several lanes      (pure)
bridge          messages between two ranks: header, features, gradients
sides           which tensors of a model are tower or language; drops the other side's modules
weights         mesh of a side, whole weights from both, loading
trainer         what trainers of both sides share: the cut, its proof, checkpoints, exchange
encoder         trainer of an encoder rank
language        trainer of a language rank
rank_bytes      bytes of the largest rank of each side, before anything is loaded
choose          class of a rank's trainer
errors          typed failures
"""
