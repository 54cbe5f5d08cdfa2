"""Strategies: which replicas a variable has, and in which context a program runs.

* `base`: scope, run, reduce, gather. `mirrored`: the strategies with a copy on every replica. `central_storage`: one
  copy on each host. `parameter_server`: variables on servers (`server_variables`, by
  `server_access`); `coordinator`: functions for other workers (`script_order`: what they need).
* `contexts`: asking where the program is; the replica context. `reducing`: values over replicas.
* `uneven`: loops of different lengths; `enrolled`: a group in one, whose calls are those of who still works.
* `inputs`: each replica's batches, and the agreement on steps (`offers`, pure).

`Variable` is offered here too, because a variable needs the default strategy, which this room makes.
"""
