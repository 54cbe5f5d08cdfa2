"""Run an unchanged mpi4py program: `python -m syncvar.compat.mpi4py [--pickle] SCRIPT [ARGS]`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from syncvar.compat.mpi4py import install
from syncvar.compat.mpi4py.mpi_objects import pickle


def main() -> None:
    """Run the program that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m syncvar.compat.mpi4py",
        description="Run an mpi4py program on syncvar. Start several ranks by "
        "`syncvar-launch --workers N -m syncvar.compat.mpi4py SCRIPT`.",
    )
    parser.add_argument(
        "--pickle",
        action="store_true",
        help="send the objects of lower-case calls by pickle; ranks then trust each other's data",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="file of the program, or with -m the name of a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args()
    if options.pickle:
        pickle.__dict__.update(type(pickle).standard().__dict__)
    install()
    sys.argv = [options.script, *options.args]
    if options.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
