"""Each refusal of the variable layer prints the line that the user should have written.

After a wanted change: SYNCVAR_REGENERATE_GOLDEN=1 pytest tests/verification/programs/test_error_texts.py, read the diff of
tests/golden/errors.txt, commit what you can explain.
"""

import os
import re
import traceback

import pytest

import syncvar as sv
from syncvar.testing import run_ranks
from tests.support.paths import GOLDEN
from tests.verification.programs.refused_programs import REFUSALS


def text_of(refusal):
    """Return the class and the text that one rank sees, without what differs from run to run."""

    def program():
        try:
            refusal.mistake()
        except Exception as error:
            printed = "".join(traceback.format_exception(error))
            if printed.count("Traceback (most recent call last)") != 1:
                return f"a chain of exceptions: {printed}"
            return f"{type(error).__name__}: {error}"
        return None

    result = run_ranks(refusal.size, program, timeout_s=120)[refusal.rank]
    assert isinstance(result, str), f"{refusal.name}: {result!r}"
    result = re.sub(r"\S*refused_programs\.py:\d+ in \S+", "train.py:7 in <module>", result)
    result = re.sub(r"digest [0-9a-f]{16}", "digest …", result)
    return re.sub(r"\bcall \d+", "call …", result)


def golden():
    """Return the texts that are kept, by name."""
    parts = re.split(r"(?m)^== (.+) ==\n", (GOLDEN / "errors.txt").read_text())
    return {
        name: text.removesuffix("\n\n").removesuffix("\n")
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.fixture(scope="module")
def texts():
    made = {refusal.name: text_of(refusal) for refusal in REFUSALS}
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        (GOLDEN / "errors.txt").write_text(
            "\n".join(f"== {name} ==\n{text}\n" for name, text in made.items())
        )
    return made


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_a_refusal_says_what_to_write(refusal, texts):
    text = texts[refusal.name]
    assert text == golden()[refusal.name]
    assert refusal.says in text


def test_every_entry_has_its_refusal():
    assert list(golden()) == [refusal.name for refusal in REFUSALS]
    assert len({refusal.name for refusal in REFUSALS}) == len(REFUSALS)


def test_the_classic_mistake_names_the_call_and_the_others(texts):
    text = texts["the classic mistake: reading a loss on rank 0 only"]
    for words in (
        "Reading ON_READ 'loss' is collective",
        "weights",
        "rank 1:",
        "rank 3:",
        "loss.local_value()",
        "every rank",
    ):
        assert words in text
    assert text.startswith(sv.MismatchError.__name__)
