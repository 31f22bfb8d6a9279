"""Conversion of a chunk of prompt groups into inputs of a forward pass, for every backend.

packing   columns of prompt groups -> padded rows                 (numpy)
rows      assignment of branches to rows, and of rows to microbatches   (numpy)
planner   a batch -> the microbatches of one rank                      (numpy)
inputs    rows -> the tensors of a loss
attention_parts   groups of a flat row -> queries and the keys they attend to   (pure)
fitness   checks that find a group that cannot be trained   (numpy)
"""
