"""Compare a block of a page that code writes with what the code makes today."""

import os


def check_block(path, begin, end, wanted):
    """Check that `wanted` stands between two lines of a page.

    With SYNCVAR_REGENERATE_GOLDEN set, write it there first.
    """
    before, found, rest = path.read_text().partition(begin)
    written, closed, after = rest.partition(end)
    assert found, f"{path.name} has no line {begin!r}"
    assert closed, f"{path.name} has no line {end!r}"
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        path.write_text(f"{before}{begin}{wanted}{end}{after}")
        written = wanted
    assert written == wanted, (
        "run this test with SYNCVAR_REGENERATE_GOLDEN=1, and read the difference"
    )
