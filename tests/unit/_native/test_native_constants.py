"""The header of the C extension has the constants of `syncvar._native.constants`, and so have the modules that name their own."""

import os

import pytest

from syncvar._native import constants
from syncvar.shm import segment_file


def test_the_header_is_generated_from_the_python_module():
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        constants.HEADER.write_text(constants.header())
    assert constants.HEADER.read_text() == constants.header(), (
        "run python syncvar/_native/constants.py, and build the extension again"
    )


def test_numbers_that_c_reads_as_64_bits_are_written_so():
    text = constants.header()
    assert f"#define ADDRESS {1 << 60}ull\n" in text
    assert f"    UNREAD = {-(1 << 30) - 1},\n" in text, "an enumerator has 32 bits"
    assert "#define LINE 64\n" in text


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (segment_file.LINE_BYTES, constants.LINE),
        (segment_file.PAGE_BYTES, constants.PAGE),
    ],
)
def test_other_rooms_have_the_same_numbers(here, there):
    assert here == there
