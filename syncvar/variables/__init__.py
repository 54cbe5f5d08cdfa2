"""Synchronized variables: one copy on each replica, kept in step as the mode says.

* `policy`: the whole contract as one pure table; start reading there.
* `variable`: carries the table out, by one read path and one write path.
* `creation`: names, manifests, the chief's initial value. `requests`: what travels.
* `equality`: compares a module or arrays over the ranks.
* `copies`: another replica's copy, read without its taking part.
* `casting`, `splitting`: which values may go in, and the exact split of a sum. `protocol`: behaving as an array.
* `places`: where a thread is. `values`: PerReplica and Mirrored.
"""
