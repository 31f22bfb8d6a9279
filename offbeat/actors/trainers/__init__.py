"""The trainers: one folder a backend, and what they share.

split_step            what every backend is: begin, microbatch, finish, and a state to keep
step_guard            which call may come next                                    (pure)
trainer_actor         the Ray actor around it: fences, failures, its own log
checkpoint_store      checkpoints on disk: written whole, found again, kept in order
checkpoint_manifest   what a checkpoint says of itself, and whether that is true
checkpoint_disk       the disk, in six operations
"""
