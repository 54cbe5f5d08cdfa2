"""Run as a launched job: the same programs on real processes. Each rank compares what it saw with the model.

Arguments: the first seed, and how many programs.
"""

import sys
import warnings

import syncvar as sv
from tests.verification.programs.program_executor import Replica
from tests.verification.programs.program_generator import seeded_program
from tests.verification.programs.program_language import shown
from tests.verification.programs.reference_model import predict
from tests.verification.programs.reusable_world import agrees


def main():
    first, count = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    replica = Replica()
    calls = 0
    for seed in range(first, first + count):
        program = seeded_program(seed, sizes=(replica.size,))
        expected = [outcomes[replica.rank] for outcomes in predict(program)]
        seen = replica.execute(program, f"p{seed}")
        calls += len(seen)
        if len(seen) != len(expected) or not all(map(agrees, expected, seen)):
            pairs = [
                (number, *pair)
                for number, pair in enumerate(zip(expected, seen, strict=False))
                if not agrees(*pair)
            ]
            raise SystemExit(f"seed {seed}: (call, expected, got) {pairs[:3]}\n{shown(program)}")
    print(f"rank {sv.rank()} of {sv.world_size()}: {count} programs, {calls} calls agree")


if __name__ == "__main__":
    main()
