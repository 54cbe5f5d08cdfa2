"""The parts of `bench/compare.py`; they need nothing but Python's standard library.

* `libraries`: how each library is found and started. `setup`: the virtual environments of the
  peers.
* `processes`: a command with a time limit, and its last words. `machine`: what a reader must know
  of the host.
* `rounds`: the interleaved turns. `table`: medians, spreads and ratios as text. `acceptance`: two
  questions that are asked of syncvar alone.
"""
