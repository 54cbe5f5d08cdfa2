"""Error codes: stable, one section for each, once at the end of a message, and the same after every copy."""

import copy
import os
import pickle
import re

import pytest

from syncvar.cli.commands import main
from syncvar.cli.printed_tables import error_sections, is_error_code
from syncvar.core import errors
from syncvar.core.errors import (
    ConfigError,
    Corrupt,
    DeadlineExceeded,
    GroupBroken,
    MismatchError,
    NotFound,
    PeerLost,
    RankFailed,
    RendezvousError,
    SyncvarError,
    error_line,
    loss_code,
)
from syncvar.core.process_ids import SERVER_0
from syncvar.protocol.exception_codec import pack_exception, unpack_exception
from syncvar_launcher.job.failure_report import LOST_FILES, TIME_LIMIT
from syncvar_launcher.local.host_resources import LimitTooLow, TimePassed
from syncvar_launcher.options.option_table import WRONG_OPTION
from tests.support.page_runner import blocks
from tests.support.paths import GOLDEN

PARTS = ("**What happened.**", "**What to do.**", "**Usable afterwards.**")
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type)]
LOSSES = [
    (1, None, "raised"),
    (1, None, "interrupted"),
    (1, -9, "lost"),
    (1, -9, "memory"),
    (1, None, "lost"),
    (1, 3, "lost"),
    (SERVER_0, -9, "lost"),
]
ERRORS = [
    ConfigError("a"),
    PeerLost(1, "h", "signal 9", "in x", status=-9),
    PeerLost(1, "h", "uncaught ValueError: no", kind="raised"),
    MismatchError("m", {0: "a"}, is_deadlock=True),
    Corrupt("k", "a", "b"),
    RankFailed(1, "h", 3, "Traceback\nConfigError: no [SV-101]\n"),
    DeadlineExceeded("x", (1,), 2.0),
    GroupBroken("x", ConfigError("y")),
    RendezvousError("x", (1,)),
    NotFound("x"),
]


def class_codes():
    """Return the codes of a class: its own one, and those that fields choose."""
    found = {kind.__name__: {kind.code} for kind in CLASSES if hasattr(kind, "code")}
    found["MismatchError"] |= {MismatchError("", is_deadlock=True).code}
    found["PeerLost"] |= {loss_code(*one) for one in LOSSES}
    return found


def test_codes_never_change():
    path = GOLDEN / "error_codes.txt"
    lines = [f"{code} {name}\n" for name, codes in class_codes().items() for code in codes]
    launcher = {
        LimitTooLow.code: "LimitTooLow",
        WRONG_OPTION: "WRONG_OPTION",
        TIME_LIMIT: "TIME_LIMIT",
        LOST_FILES: "LOST_FILES",
    }
    lines += [f"{code} {name}\n" for code, name in launcher.items()]
    text = "".join(sorted(lines))
    if os.environ.get("SYNCVAR_REGENERATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text, "a code never gets another meaning: add a new one"
    assert len({line.split()[0] for line in lines}) == len(lines), "a code has two meanings"
    assert TimePassed.code == TIME_LIMIT
    assert list(error_sections()) == [line.split()[0] for line in sorted(lines)]


@pytest.mark.parametrize("code", error_sections())
def test_a_section_is_whole(code):
    text = error_sections()[code]
    assert [part for part in PARTS if part in text] == list(PARTS)
    shown = [body for words, body in blocks(text) if words[:2] == ["console", "fails"]]
    assert shown, "no program raises this code"  # test_pages.py runs it, and compares its output
    assert re.search(rf"\[{code}\]|explain {code}$", shown[-1], re.MULTILINE)
    names = [name for name, codes in class_codes().items() if code in codes]
    assert all(text.startswith(f"### {code}: {name},") for name in names)


@pytest.mark.parametrize("word", ["SV-402", "sv-402", "402", "sv402"])
def test_explain_prints_a_section(word, capsys):
    assert main(["explain", word]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SV-402: NotFound, there is no checkpoint\n\nWhat happened. ")
    assert "\nsv402.py:\n    import syncvar as sv\n" in text
    assert "```" not in text
    assert "Corrupt" not in text, "the next section"
    main(["explain", "105"])
    assert "Ranks disagree" not in capsys.readouterr().out, "the next family"


def test_explain_of_an_unknown_code_lists_near_ones(capsys):
    assert main(["explain", "SV-404"]) == 2
    assert "no error code SV-404; near it are SV-401, SV-402, SV-403" in capsys.readouterr().err


def test_other_words_are_no_codes():
    assert not any(map(is_error_code, ("1a2b3c4d", "logs", "12345678", "SV-1", "SV-1000")))


@pytest.mark.parametrize("error", ERRORS, ids=error_line)
def test_a_message_ends_with_its_code_once(error):
    text = str(error)
    assert text.endswith((f" [{error.code}]", f"\n[{error.code}]"))
    assert error_line(error) == f"{type(error).__name__}: {text[: -len(f' [{error.code}]')]}" or (
        isinstance(error, RankFailed)  # a traceback is evidence
    )
    for quoting in (ConfigError(f"it failed: {error}; try again"), PeerLost(1, "h", f"x: {error}")):
        assert re.findall(r"SV-\d+", str(quoting)) == [quoting.code]


@pytest.mark.parametrize("error", ERRORS, ids=error_line)
@pytest.mark.parametrize(
    "copied",
    [
        lambda error: pickle.loads(pickle.dumps(error)),
        copy.copy,
        lambda error: unpack_exception(pack_exception(error)),
    ],
)
def test_a_copy_has_the_same_text_and_fields(error, copied):
    found = copied(error)
    assert (type(found), str(found), found.code) == (type(error), str(error), error.code)
    if not isinstance(error, GroupBroken):  # its cause has no equality
        assert vars(found) == vars(error)


def test_a_subclass_of_a_program_has_the_code_of_its_base():
    class Mine(SyncvarError):
        pass

    assert str(Mine("x")) == "x [SV-100]"
    with pytest.raises(Mine) as caught:
        raise Mine("y") from ConfigError("x")
    assert str(caught.value.__cause__) == "x [SV-101]"
