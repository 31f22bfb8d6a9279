"""Trainers: one package per backend, and the code that they share.

rank                  one rank: fence, classified failures, checkpoints, releases; a Ray actor inherits it
backend               base class of every backend: begin, microbatch, finish, save and load state
model_trainer         the trainer of a real model, from parts: one rank's split step over sums of gradients
parts                 interfaces of these parts: passes, updates, state
step_sums             sums of a step over its microbatches and ranks
batches/              prompt groups as padded rows and tensors
ranks/                process group, collectives, assignment of groups to ranks, assembly of a rank
checkpoints/          checkpoints and exports on disk: atomic, checkpoints verified, written and read by all ranks
expert_names          expert weights stored separately or fused, with or without a gate
receiver_names        the weight names that the engines of a run load, checked before the first step
flops                 floating-point operations and time of passes, and what devices can do at most
senders               senders of weight releases, and their canaries
held_columns          columns that a rank receives with a call, or ahead of it
cpu_time              CPU seconds of a rank's process in a step
memory                peak memory of a rank in each phase of a step
no_trainer            trainer of an evaluation, which trains nothing
sides                 the two sides of an image-text model: vision tower and language model
trainer_plugin        interface of a backend that a plug-in provides
movement              check that an optimizer step changed the weights
"""
