"""Host files: the spellings of Open MPI, MPICH, DeepSpeed and node files of schedulers, and errors that show the place."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError
from syncvar_launcher.hosts.agent_connection import remote_command, ssh_command
from syncvar_launcher.options.hostfile import (
    Host,
    HostfileError,
    expand_ranges,
    parse_hostfile,
    parse_hosts,
    select_named,
)


def read(text):
    return parse_hostfile(text.encode(), "hosts").hosts


def slots(text):
    return [(one.name, one.slots) for one in read(text)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=2\nb slots=4", [("a", 2), ("b", 4)]),
        ("a:2\nb:4", [("a", 2), ("b", 4)]),
        ("a\nb.c-d_e.org\n10.0.0.1", [("a", None), ("b.c-d_e.org", None), ("10.0.0.1", None)]),
        ("a count=2\nb cpu=3", [("a", 2), ("b", 3)]),
        ("\ufeffa slots=2\r\n\r\n  b:1\r\n", [("a", 2), ("b", 1)]),
        (
            "# all\na # one\n\tb //two\n/* c\nd */ e /* f */ slots=3\n//g",
            [("a", None), ("b", None), ("e", 3)],
        ),
        ("[fd00::7] slots=2\n[FD00:0::8]:3\n::x/* no */", None),
        ("[fd00::7] slots=2\n[FD00:0::8]:3", [("fd00::7", 2), ("fd00::8", 3)]),
        ("n[01-03,07]:2", [("n01", 2), ("n02", 2), ("n03", 2), ("n07", 2)]),
        ("r[1-2]n[8-10]x", [(f"r{r}n{n}x", None) for r in (1, 2) for n in (8, 9, 10)]),
        ("n[1-4]:2\n^n[2-3]", [("n1", 2), ("n4", 2)]),
        ("n1\nn1\nn2\nn1", [("n1", 3), ("n2", None)]),
        ("a:2\na slots=3\na", [("a", 6)]),
    ],
)
def test_what_is_understood(text, hosts):
    if hosts is None:
        with pytest.raises(HostfileError):
            read(text)
    else:
        assert slots(text) == hosts


def test_all_options_of_a_host():
    text = 'ann@n1:2 max_slots=4 port=2222 addr=10.0.0.7 python="/opt/my env/bin/python" cwd=/data//runs'
    assert read(text) == (
        Host(
            "n1", 2, 4, "ann", 2222, "10.0.0.7", "/opt/my env/bin/python", "/data//runs", "hosts:1"
        ),
    )
    assert read("n1 slots-max=4 user=ann")[0][1:4] == (None, 4, "ann")
    assert read("n1 user=ann")[0].login() == "ann@n1"
    assert read("n1")[0].login() == "n1"


def test_what_is_put_together_is_told():
    found = parse_hostfile(b"a:2 user=ann\n\na slots=1 port=23", "hosts")
    assert found.hosts == (Host("a", 3, None, "ann", 23, origin="hosts:1"),)
    assert found.notices == ("a is named again in hosts:3: it has 3 slots in all",)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a slot=4", 1, 3, "'slot' is no option of a host (did you mean slots?)"),
        ("a colour=4", 1, 3, "there are slots, max_slots, user, port, addr, python, cwd"),
        ("a\nb 4", 2, 3, "write slots=4"),
        ("a b", 1, 3, "which has the form key=value"),
        ("a slots=0", 1, 9, "from 1 to 65536, not '0'"),
        ("a slots=", 1, 9, "not ''"),
        ("a slots=²", 1, 9, "not '²'"),
        ("a:x", 1, 3, "the number of slots is a whole number"),
        ("a:2 slots=2", 1, 5, "slots of this host is given twice"),
        ("a slots=4 max_slots=2", 1, 1, "make it at most 2"),
        ("a port=70000", 1, 8, "from 1 to 65535"),
        ("-oProxyCommand=x", 1, 1, "a line begins with a host"),
        ("-oProxyCommand", 1, 1, "'-oProxyCommand' with '-' (U+002D)"),
        ("n\u0430me", 1, 1, "(U+0430)"),
        ("a;b", 1, 1, "with ';' (U+003B)"),
        ("$(x)", 1, 1, "is not allowed here"),
        ("a..", 1, 1, "begins and ends with a letter or digit"),
        ("Ann@a", 1, 1, "no name of a user"),
        ("ann@", 1, 5, "is not allowed here"),
        ("fd00::7", 1, 1, "an IPv6 address stands in brackets: [fd00::7]"),
        ("[fd00::7", 1, 1, "is not closed"),
        ("[fd00::zz]", 1, 2, "no IPv6 address"),
        ("[fe80::7%e;x]", 1, 10, "'e;x' is no name of an interface"),
        ("[fd00::7]4", 1, 10, "write :N or slots=N behind it"),
        ("n[04-01]", 1, 2, "write 01-04"),
        ("n[a-b]", 1, 2, "no list of numbers and ranges"),
        ("n[1-2", 1, 2, "open or closed alone"),
        ("n[0-99999999]", 1, 1, "more than 65536 hosts"),
        ("+n1", 1, 1, "allocation of a scheduler"),
        ("rank 0=a slot=0", 1, 1, "this is a rank file"),
        ("slots=4", 1, 1, "begins with a host"),
        ("a:2\n^b1", 2, 1, "is removed and is not among the hosts"),
        ("node1\n^node2", 2, 1, "did you mean node1?"),
        ("a\n^a slots=2", 2, 4, "write ^host alone"),
        ("a user=x\na user=y", 2, 1, "with user=x in hosts:1 and with user=y here"),
        ("a python=-c", 1, 10, "does not begin with -"),
        ("a addr=there", 1, 8, "no address for links"),
        ("a addr=fd00::zz", 1, 8, "no address for links"),
        ("a addr=fe80::7%eth0", 1, 8, "no address for links"),
        ("a addr=[10.0.0.7", 1, 8, "no address for links"),
        ("n" + "[1]" * 9, 1, 2, "at most 8 ranges"),
    ],
)
def test_an_error_shows_the_place_and_what_to_write(text, line, column, words):
    with pytest.raises(HostfileError) as raised:
        read(text)
    told = str(raised.value)
    assert words in told
    assert (raised.value.line, raised.value.column) == (line, column), told
    assert told.startswith(f"hosts:{line}:{column}: ")
    assert told.splitlines()[-1] == "[SV-101]"
    assert told.splitlines()[-2] == "  " + " " * (column - 1) + "^"
    assert told.splitlines()[-3] == "  " + text.split("\n")[line - 1]


@pytest.mark.parametrize("content", [b"", b"\n# nothing\n", b"a\n^a"])
def test_no_host_is_an_error(content):
    with pytest.raises(HostfileError, match="there is no host here"):
        parse_hostfile(content, "hosts")


def test_a_file_that_is_no_text_is_told():
    with pytest.raises(HostfileError, match=r"hosts:2:1: byte 4 is not UTF-8 text"):
        parse_hostfile(b"a:2\n\xff\xfe", "hosts")


def test_hosts_on_the_command_line():
    assert [
        (one.name, one.slots, one.user) for one in parse_hosts("a:2,ann@n[1,3]:4,[fd00::7]:1").hosts
    ] == [
        ("a", 2, None),
        ("n1", 4, "ann"),
        ("n3", 4, "ann"),
        ("fd00::7", 1, None),
    ]
    assert [one.name for one in parse_hosts("node1.example.org.:2,b").hosts] == [
        "node1.example.org",
        "b",
    ], "a name in full"
    with pytest.raises(HostfileError, match=r"with '-' \(U\+002D\) is not allowed here"):
        parse_hosts("node1-")
    for wrong, column in (("a,,b", 3), ("a, b", 3), ("a b", 1), ("", 1), ("a,-x", 3)):
        with pytest.raises(HostfileError) as raised:
            parse_hosts(wrong)
        assert raised.value.column == column
        assert str(raised.value).startswith("-H: ")


def test_hosts_are_selected_by_name():
    hosts = read("n[1-4]:2")
    assert [one.name for one in select_named(hosts, "n[2-4]", "n3")] == ["n2", "n4"]
    assert select_named(hosts, None, None) == hosts
    with pytest.raises(
        ConfigError,
        match=r"--include names n9, which is not among the hosts; these are n1, n2, n3, n4",
    ):
        select_named(hosts, "n9", None)
    with pytest.raises(ConfigError, match=r"--exclude names node1.*"):
        select_named(hosts, None, "node1")
    with pytest.raises(ConfigError, match="leave no host"):
        select_named(hosts, "n1", "n1")


def test_leading_zeros_are_kept_and_widths_grow():
    assert list(expand_ranges("n[08-10]")) == ["n08", "n09", "n10"]
    assert list(expand_ranges("n[8-10]")) == ["n8", "n9", "n10"]
    assert list(expand_ranges("n[098-101]")) == ["n098", "n099", "n100", "n101"]


@given(
    st.binary(max_size=60)
    | st.text(alphabet='an[]01-:,^@#/*" =slot\n\r', max_size=60).map(str.encode)
)
def test_any_bytes_are_understood_or_refused(content):
    try:
        found = parse_hostfile(content, "hosts")
    except HostfileError:
        return
    names = [one.name for one in found.hosts]
    assert names
    assert len(set(names)) == len(names)
    assert not any(one.startswith("-") for one in names)


HOSTILE_NAMES = [
    "-oProxyCommand=touch${IFS}x", "-oProxyCommand", "-v", "--", "a b", "a;b", "a|b", "a&b", "a`b`", "a$(b)", "a${b}", "a$b", "a>b", "a<b", "a'b", 'a"b', "a\\b", "a\nb", "a\rb",
    "a\tb", "a\0b", "a/b", "../a", "a*", "a?", "a~", "~", "a!b", "a%h", "a=b", "a(b)", "a{b,c}", "\u0430bc", "a\u200bb", "a\u202eb", "\uff41", "ä", ".", "..", ".a", "a..", "_a", "a_",
    "a-", "a" * 254, "[::1", "::1]", "[x]", "[fd00::1%eth0;id]", "[fe80::1%$(id)]", "\x1b[31ma", "user name@a", "-l@a", "Root@a", "$(id)@a", "a;b@a", "@a", "a@b@c d",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_NAMES, ids=ascii)
def test_a_name_that_is_none_never_becomes_a_host(text):
    """What passes is a name, or an address, that means nothing to a shell and is no option."""
    for parse in (
        lambda: parse_hosts(text),
        lambda: parse_hostfile(text.encode(), "hosts"),
        lambda: select_named(parse_hosts("a").hosts, text, None),
    ):
        try:
            found = parse()
        except ConfigError:
            continue
        for host in getattr(found, "hosts", found):
            assert re.fullmatch(
                r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-f:]+(%[A-Za-z0-9._-]+)?", host.name
            ), host
            assert host.user is None or re.fullmatch(r"[a-z_][a-z0-9_-]*", host.user), host
            line = ssh_command(("ssh",), host, None, "python3")
            assert line[-3:] == ["--", host.login(), remote_command("python3")]


@pytest.mark.parametrize(
    "text",
    [text for text in HOSTILE_NAMES if not {" ", "\n", "\r", "\t", "="} & set(text)],
    ids=ascii,
)
def test_a_name_of_one_word_that_is_none_is_refused(text):
    with pytest.raises(ConfigError):
        parse_hosts(text)
