"""A chunk of prompt groups as what a forward pass takes, the same for every backend.

packing   columns of prompt groups -> padded rows                 (numpy)
rows      which samples share a row, which rows a microbatch      (numpy)
cutting   a batch -> the microbatches of one rank                  (numpy)
inputs    rows -> the tensors of a loss
fitness   which group cannot be trained                     (numpy)
"""
