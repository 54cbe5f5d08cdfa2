"""One rank of a launch: connects to the conductor's socket and does what it is told, case by case.

syncvar-launch --workers N tests/verification/conformance/replica_process.py SOCKET FOLDER
"""

import json
import os
import socket
import sys
import time
import warnings

import syncvar as sv


def main(path, folder):
    from tests.verification.conformance import case_interpreter

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
                    if order["sabotage"] and order["sabotage"][0] == sv.rank():
                        harm(order["sabotage"][1])
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


def harm(how):
    """Do what a broken case might do, to test the conductor."""
    if how == "hang":
        time.sleep(3600)
    os._exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
