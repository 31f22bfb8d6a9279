"""Conversion of a chunk of prompt groups into inputs of a forward pass, for every backend.

packing   columns of prompt groups -> padded rows                 (numpy)
planner   a batch -> the microbatches of one rank                      (numpy)
inputs    rows -> the tensors of a loss
"""
