"""The torch trainer: any Hugging Face causal LM, sharded by FSDP2, or whole on a single rank.

loading        the model of a directory: loaded, proved, sharded over the ranks
passes         forward and backward passes of microbatches
state          weights and optimizer on disk, exported, and reset to their initial values
forward        rows -> log-probabilities of the wanted tokens
logprobs       log-probabilities from logits, with a lean backward
optimizer      AdamW, clipping, master weights
sharding       weights and gradients sharded over the ranks
tensor_*       matrices divided over tensor ranks, and proofs that these compute the same step
model          load, and facts of a model
flops          floating-point operations of a model's passes
"""

from offbeat.trainers.torch.torch_trainer import TorchTrainer

__all__ = ["TorchTrainer"]
