"""One rank of a launch: connects to the launcher's socket and does what it is told, case by case.

syncvar-launch --workers N tests/verification/conformance/replica_process.py SOCKET FOLDER
"""

import json
import socket
import sys
import time
import warnings
from pathlib import Path

import syncvar as sv

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a rank starts in this folder
from tests.verification.conformance import case_interpreter  # noqa: E402


def main(path, folder):
    warnings.simplefilter("ignore")  # that initial values differ is said, and not compared
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        stream = line.makefile("rw", encoding="utf-8", newline="\n")

        def say(**fields):
            stream.write(json.dumps(fields) + "\n")
            stream.flush()

        sv.init()
        say(rank=sv.rank())
        for text in stream:
            order = json.loads(text)
            match order["do"]:
                case "case":
                    began = time.monotonic()
                    differences, broken = case_interpreter.run_case(
                        order["case"], order["prefix"], folder
                    )
                    say(differences=differences, broken=broken, seconds=time.monotonic() - began)
                case "rejoin":
                    sv.shutdown()
                    sv.init()
                    say(joined=True)
                case "end":
                    break
        sv.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
