"""The torch trainer: any Hugging Face causal LM, one rank, everything inside one process.

split_step   TorchTrainer: forward, backward and optimizer of a step, weights in and out
packing      columns of prompt groups -> padded rows                             (numpy)
rows         which samples share a row, which rows a microbatch                  (numpy)
forward      rows -> log-probabilities of the wanted tokens
logprobs     log-probabilities from logits, with a lean backward
accumulate   sums of a step over its microbatches
optimizer    AdamW, clipping, master weights; schedule: the learning rate
model        load, digest, save
state_files  tensors in files, for checkpoints
"""

from offbeat.actors.trainers.torch_backend.split_step import TorchTrainer

__all__ = ["TorchTrainer"]
