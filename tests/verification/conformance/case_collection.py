"""The cases of this folder, and what they need that does not exist yet."""

import json
from pathlib import Path

import syncvar as sv
from tests.verification.conformance import case_grammar

CASES = Path(__file__).with_name("cases")

# Public name -> what a case that needs it says. A case that needs a name which does not exist is not run.
_FEATURES = {
    "CentralStorageStrategy": lambda case: case["strategy"] == "central_storage",
    "Checkpoint": lambda case: _does(case, "save", "restore", "deferred_restore"),
    "DistributedDataset": lambda case: _does(
        case, "distribute_dataset", "dataset_reduce", "distribute_from_function", "dataset_context"
    ),
    "InputContext": lambda case: _does(
        case, "input_context", "distribute_from_function", "dataset_context"
    ),
    "partitioners": lambda case: _does(case, "partition", "row_ranges"),
}

# The categories (and the single cases of other categories) that wait for a feature: the test run prints this table, and
# a test compares it with what is missing, so that it shrinks when a feature arrives.
NOT_YET: dict[str, str] = {}


def load(folder=""):
    """Return every case, with its category, in the order of files and lines; those of "servers" need a job with servers."""
    return [
        {"category": path.stem} | case
        for path in sorted((CASES / folder).glob("*.json"))
        for case in json.loads(path.read_text())
    ]


def missing(case):
    """Return the public names that a case needs and that do not exist, as a list."""
    return [name for name, needs in _FEATURES.items() if needs(case) and not hasattr(sv, name)]


def without_category(case):
    """Return a case as the grammar knows it."""
    return {key: value for key, value in case.items() if key != "category"}


def waits(case):
    """Return whether the table says that a case waits."""
    return any(
        case["category"] == entry
        or case["id"] == entry
        or (entry.endswith("/") and case["id"].startswith(entry))
        for entry in NOT_YET
    )


def _does(case, *operations):
    return any(step["op"] in operations for step in case_grammar.operations(case))
