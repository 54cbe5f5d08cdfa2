"""The flight recorder: what this process has done last, kept in memory and told when somebody asks or something goes wrong.

`entries` is what stands in its ring, `recorder` the ring and the file it is written to, `totals` the sums of all calls for
`--stats`, and `call_sites` where in the user's program a call was made.
"""
