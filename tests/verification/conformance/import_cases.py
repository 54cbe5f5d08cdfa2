"""Bring cases from another collection into `cases/`: one file for each category, one case on each line.

    python -m tests.verification.conformance.import_cases COLLECTION.json

The collection keeps steps and expectations apart; here each step carries what is expected of it. The category is the
name of the file.
"""

import json
import sys
from pathlib import Path

CASES = Path(__file__).with_name("cases")


def own_form(case):
    """Return a case of the collection in the form of this project."""
    steps = [
        step | {"expect": expect}
        for step, expect in zip(case["steps"], case["expect"], strict=True)
    ]
    kept = {
        key: value
        for key, value in case.items()
        if key not in ("category", "steps", "expect", "tensorflow", "basis")
    }
    told = {key: case[key] for key in ("basis", "tensorflow") if key in case}
    return kept | {"steps": steps} | told


def main(path):
    by_category = {}
    for case in json.loads(Path(path).read_text())["cases"]:
        by_category.setdefault(case["category"], []).append(own_form(case))
    CASES.mkdir(exist_ok=True)
    for category, cases in sorted(by_category.items()):
        lines = ",\n".join(
            json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases
        )
        (CASES / f"{category}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
