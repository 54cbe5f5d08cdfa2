"""Checkpoints: variables and other state on disk, whole or not at all, for any number of replicas.

A checkpoint is a folder. Each rank writes a shard (safetensors), all at the same time; rank 0 writes the manifest last, and that
is the commit.

* `checkpoint`: `Checkpoint`, objects under names. `manager`: `CheckpointManager`, the checkpoints of a run.
* `objects`: what can be saved, and how each kind is. `saving`, `restoring`: the two collectives, step by step; start reading there.
* `alone`: `save` and `load`, one file of one rank, no collective.
* `pending`: saves that go on beside the program. `preemption`: SIGTERM as a notice.
* `files`, `lock`, `reading`: the disk. What is written there is synced before it counts, what is read is compared before it is used.
* Pure: `manifest` and `tensors` (what the files hold, checked), `agreement` and `sharing` (who writes what), `naming`, `retention`.
"""
