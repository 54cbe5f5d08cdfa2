import pytest

from syncvar.core import exit_status
from syncvar.core.exit_status import exit_code_of
from syncvar.core.process_ids import rank_spans
from syncvar_launcher.job.failure_report import (
    EvidenceFiles,
    FailureReport,
    SecondaryFailure,
    WorkerTraceback,
    describe_exit,
    failure_block,
    interrupted_block,
    mask_arguments,
    mask_environment,
)
from syncvar_launcher.options.option_table import ranks_of


def test_block_with_traceback_others_and_commands():
    failure = FailureReport(
        rank=2,
        status=1,
        host="b",
        elapsed_s=3.21,
        call="all_reduce #12 at train.py:40",
        traceback='Traceback (most recent call last):\n  File "train.py", line 7, in <module>\nValueError: no\n',
        last_lines=("not shown",),
    )
    waiting = "waiting in all_reduce #12 at train.py:40"
    others = [
        SecondaryFailure(3, waiting),
        SecondaryFailure(0, waiting),
        SecondaryFailure(1, waiting),
        SecondaryFailure(4, "computing"),
    ]
    assert failure_block(failure, others, arguments=["-n", "5", "train.py"]) == (
        "syncvar: rank 2 on b exited with status 1 after 3.2 s in all_reduce #12 at train.py:40\n"
        "evidence: traceback of rank 2\n"
        "  Traceback (most recent call last):\n"
        '    File "train.py", line 7, in <module>\n'
        "  ValueError: no\n"
        "others:\n"
        "  ranks 0, 1, 3: waiting in all_reduce #12 at train.py:40\n"
        "  rank 4: computing\n"
        "try:\n"
        "  syncvar-launch --debug 2 -n 5 train.py\n"
        "  syncvar-launch --log-dir logs -n 5 train.py\n"
    )


def test_block_shows_the_last_lines_where_there_is_no_traceback():
    text = failure_block(
        FailureReport(rank=0, status=-11, last_lines=[f"line {i}" for i in range(50)])
    )
    assert text.startswith(
        "syncvar: rank 0 was killed by signal 11 (SIGSEGV)\nevidence: last 40 lines of rank 0\n"
    )
    assert "  line 10\n" in text
    assert "  line 9\n" not in text


def test_lines_that_stand_above_are_not_repeated():
    text = failure_block(FailureReport(rank=0, status=3, last_lines=["a", "b"], stands_above=True))
    assert text == "syncvar: rank 0 exited with status 3\nevidence: last 2 lines of rank 0, above\n"


def test_block_names_the_whole_output_and_does_not_repeat_options():
    text = failure_block(
        FailureReport(rank=1, status=3),
        arguments=["--debug", "0", "a.py"],
        files=EvidenceFiles("logs"),
    )
    assert text == (
        "syncvar: rank 1 exited with status 3\nevidence: rank 1 wrote nothing\n"
        "whole output: logs (rank-1.out and rank-1.err)\n"
    )


def test_block_of_an_elastic_job_offers_no_options_that_it_cannot_have():
    words = ["KeyError: 'MASTER_ADDR'"]
    failure = FailureReport(rank=1, status=1, last_lines=words)
    plain = failure_block(failure, [], arguments=["a.py"])
    elastic = failure_block(failure._replace(is_elastic=True), [], arguments=["a.py"])
    assert "--debug 1" in plain
    assert "--torch-env" in plain
    assert "--debug" not in elastic
    assert "--torch-env" not in elastic
    assert "--log-dir logs" in elastic


def test_block_names_the_flight_records():
    text = failure_block(
        FailureReport(rank=1, status=3),
        files=EvidenceFiles(records="flight records in a\n (syncvar explain 12345678)"),
    )
    assert text.endswith("\nevidence: flight records in a\\x0a (syncvar explain 12345678)\n")


@pytest.mark.parametrize("arguments", [["-n", "2", "ddp.py"], ["--torch-env", "ddp.py"]])
def test_a_rank_that_misses_the_variables_of_torch_is_offered_them(arguments):
    message = "ValueError: environment variable MASTER_ADDR expected, but not set"
    traceback = f'Traceback (most recent call last):\n  File "ddp.py", line 3\n{message}\n'
    for failure in (
        FailureReport(1, 1, traceback=traceback),
        FailureReport(1, 1, last_lines=[message]),
    ):
        _, _, offered = failure_block(failure, arguments=arguments).partition("try:\n")
        is_offered = offered.startswith("  syncvar-launch --torch-env -n 2 ddp.py\n")
        assert is_offered is ("--torch-env" not in arguments)


def test_block_of_the_job_as_a_whole():
    text = failure_block(
        FailureReport(rank=-1, status=None, reason="ranks 3, 4 did not come within 300 s")
    )
    assert text == "syncvar: the job failed: ranks 3, 4 did not come within 300 s\n"


def test_reason_stands_beside_the_status():
    text = failure_block(FailureReport(rank=0, status=0, reason="left before shutdown"))
    assert text.startswith("syncvar: rank 0 exited with status 0: left before shutdown\n")


def test_text_of_ranks_is_escaped_and_makes_no_new_lines():
    failure = FailureReport(
        rank=0, status=1, host="h\x1b[2J", traceback="E: a\x0cb\u202ec\r\n\x1b]0;t\x07", call="x\ny"
    )
    text = failure_block(
        failure, [SecondaryFailure(1, "a\nb\x9bc")], remedies=[["h\x1b"]], arguments=["a"]
    )
    assert "\x1b" not in text
    assert r"on h\x1b[2J" in text
    assert r"a\x0cb\u202ec\x0d" in text
    assert r"in x\x0ay" in text
    assert r"rank 1: a\x0ab\x9bc" in text
    assert r"h\x1b" in text


def test_long_traceback_keeps_its_head_and_its_end():
    lines = [f"frame {i}" for i in range(1000)]
    text = failure_block(FailureReport(rank=0, status=1, traceback="\n".join(lines)))
    assert "  frame 5\n    (960 lines left out; -v shows them)\n  frame 966\n" in text
    assert text.endswith("  frame 999\n")
    assert text.count("\n") == 43
    whole = failure_block(
        FailureReport(rank=0, status=1, traceback="\n".join(lines)), is_whole=True
    )
    assert whole.count("\n") == 1002


def trace(line, message):
    return f'Traceback (most recent call last):\n  File "a.py", line {line}, in <module>\n    f()\n{message}\n'


def block(*texts, own=(), others=True):
    """Return the block of ranks that raised; the first one is the first failure."""
    raised = [WorkerTraceback(rank, text, rank not in own) for rank, text in enumerate(texts)]
    others = (
        [SecondaryFailure(rank, "elsewhere") for rank in range(1, len(texts))] if others else []
    )
    return failure_block(FailureReport(rank=0, status=1, traceback=texts[0]), others, raised=raised)


def test_equal_tracebacks_are_shown_once():
    assert block(*[trace(7, "KeyError: 3")] * 8) == (
        "syncvar: rank 0 exited with status 1\n"
        "evidence: traceback of ranks 0-7\n"
        "  Traceback (most recent call last):\n"
        '    File "a.py", line 7, in <module>\n'
        "      f()\n"
        "  KeyError: 3\n"
    )


def test_a_message_that_names_each_rank_is_shown_once_where_it_is_equal():
    table = "MismatchError: not the same call\n  rank 0: sum\n  rank 1: sum\n  rank 2: mean"
    text = block(*[trace(7, table)] * 3)
    assert "evidence: traceback of ranks 0-2\n" in text
    assert text.count("MismatchError") == 1


def test_where_messages_differ_three_are_listed():
    text = block(*[trace(7, f"KeyError: {max(1, rank)}\nmore") for rank in range(7)])
    assert "evidence: traceback of ranks 0-6, with the message of ranks 0, 1\n" in text
    assert text.count("Traceback") == 1
    assert text.endswith(
        "  KeyError: 1\n  more\n  rank 2: KeyError: 2\n  rank 3: KeyError: 3\n  rank 4: KeyError: 4\n  ranks 5, 6: other messages\n"
    )


def test_what_a_rank_says_of_itself_makes_no_difference():
    text = block(
        *[
            trace(7, f"ConfigError: no such op\nrefused on rank {rank}; see rank 7")
            for rank in range(7)
        ]
    )
    assert "evidence: traceback of ranks 0-6\n" in text
    assert text.endswith("  ConfigError: no such op\n  refused on rank 0; see rank 7\n")
    text = block(trace(7, "KeyError: 1\nnote a"), trace(7, "KeyError: 1\nnote b"))
    assert text.endswith("  note a\n  rank 1: note b\n"), "the first line that differs"


def test_errors_of_others_are_shown_but_those_that_follow_from_the_first():
    text = block(
        trace(1, "A"),
        trace(2, "B"),
        trace(3, "PeerLost: …"),
        trace(2, "B"),
        trace(4, "C"),
        trace(5, "D"),
        own=(2,),
    )
    assert [line for line in text.split("\n") if line.startswith("evidence: ")] == [
        "evidence: traceback of rank 0",
        "evidence: traceback of ranks 1, 3",
        "evidence: traceback of rank 4",
    ]
    assert text.endswith("others:\n  ranks 2, 5: elsewhere\n")


def test_errors_are_shown_after_a_failure_that_is_none():
    raised = [WorkerTraceback(rank, trace(7, "ValueError: while ending")) for rank in (0, 2)]
    text = failure_block(
        FailureReport(rank=-1, status=None, reason="the limit"),
        [SecondaryFailure(1, "there")],
        raised=raised,
    )
    assert "evidence: traceback of ranks 0, 2\n" in text
    text = failure_block(FailureReport(rank=1, status=-9, last_lines=["x"]), raised=raised)
    assert "evidence: last line of rank 1\n  x\nevidence: traceback of ranks 0, 2\n" in text
    text = interrupted_block("SIGINT", [SecondaryFailure(1, "there")], raised)
    assert text.endswith(
        "rank 1: there\nevidence: traceback of ranks 0, 2\n  Traceback (most recent call last):\n"
        '    File "a.py", line 7, in <module>\n      f()\n  ValueError: while ending\n'
    )


def test_last_words_and_syntax_errors_are_told_once():
    assert "evidence: last words of ranks 0-2\n  out of luck\n" in block(
        "out of luck", "out of luck", "out of luck"
    )
    syntax = '  File "a.py", line 2\n    if True print(1)\n       ^\nSyntaxError: invalid syntax\n'
    assert "evidence: traceback of ranks 0, 1\n" in block(syntax, syntax)


def test_many_different_others_are_summed_up():
    text = failure_block(
        FailureReport(rank=0, status=1),
        [SecondaryFailure(rank, f"at line {rank}") for rank in range(1, 65)],
    )
    assert "  rank 7: at line 7\n  ranks 8-64: elsewhere\n" in text


def test_blocks_use_no_exclamation_marks():
    text = failure_block(
        FailureReport(rank=0, status=1),
        [SecondaryFailure(1, "computing")],
        arguments=["a.py"],
        files=EvidenceFiles("logs"),
    )
    assert "!" not in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((0, 1), "0, 1"),
        ((0, 1, 2), "0-2"),
        ((7, 0, 1, 2, 3, 7), "0-3, 7"),
        ((1, 3, 5), "1, 3, 5"),
    ],
)
def test_ranks_are_compressed(ranks, text):
    assert rank_spans(ranks) == text
    assert not text or ranks_of(text, 8) == set(ranks), "and read again"


def test_statuses():
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(-34) == "was killed by signal 34 (SIGRTMIN)"
    assert describe_exit(-40) == "was killed by signal 40"
    assert [exit_code_of(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_every_own_code_has_a_meaning():
    codes = {
        value
        for name, value in vars(exit_status).items()
        if name[0].isupper() and name.isupper() and isinstance(value, int)
    }
    assert codes == set(exit_status.MEANINGS)


def test_secrets_are_masked():
    names = ["API_KEY", "token", "MY_SECRET_X", "DB_PASSWORD", "AUTHORIZATION", "Cookie"]
    assert set(mask_environment(dict.fromkeys(names, "value")).values()) == {"***"}
    assert mask_environment({"HOME": "/root"}) == {"HOME": "/root"}


def test_secrets_on_the_command_line_are_masked_in_what_to_try():
    arguments = [
        "--env",
        "TOKEN=abc",
        "--env=API_KEY=abc",
        "--env",
        "TOKEN",
        "-x",
        "KEY=abc",
        "-xKEY=abc",
        "-n",
        "2",
        "a.py",
        "KEY=1",
    ]
    assert mask_arguments(arguments) == [
        "--env",
        "TOKEN=***",
        "--env=API_KEY=***",
        "--env",
        "TOKEN",
        "-x",
        "KEY=***",
        "-xKEY=***",
        "-n",
        "2",
        "a.py",
        "KEY=1",
    ]
    assert "abc" not in failure_block(FailureReport(rank=0, status=1), arguments=arguments)
