"""Modes of encryption between hosts: chosen once for all ranks, told, refused where ranks differ, and off only on purpose."""

import json
import os
import secrets
import subprocess
import sys

import pytest

from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.dry_run import dry_run, dry_run_hosts
from syncvar_launcher.job.job import Job
from syncvar_launcher.options.parse_options import parse
from tests.support.launching import free_ports

SUM = """
import numpy as np
import syncvar as sv
from probe import note
from syncvar.bootstrap.process import current
total = sv.all_reduce(np.arange(300_000.0) * (sv.rank() + 1))
note("met", total=float(total[-1]), transport=current().transport)
"""
WORDS = {
    "required": "encrypted tcp",
    "control-only": "unencrypted tcp with encrypted control",
    "off": "unencrypted tcp",
}
OPENED = "encryption is off: anyone who reaches the ports of this job can read and change what its hosts send, and end it"


def options(mode):
    return ["--fake-hosts", "2", "--encryption", mode, *(["--insecure"] if mode == "off" else [])]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("required", marks=pytest.mark.slow),
        "control-only",
        pytest.param("off", marks=pytest.mark.slow),
    ],
)
def test_a_job_says_its_mode_and_sums_right(launch, tmp_path, mode):
    job = launch(
        SUM,
        workers=3,
        options=[*options(mode), "--color", "always"],
        env={"SYNCVAR_TRACE": str(tmp_path / "trace")},
    )
    assert job.wait() == 0, job
    assert {event["total"] for event in job.events("met")} == {299_999.0 * 6}
    for event in job.events("met"):
        assert f"; {WORDS[mode]} between 2 hosts on lanes" in event["transport"]
    assert job.err.count(f"\x1b[31msyncvar-launch: {OPENED}\x1b[0m\n") == (mode == "off"), job.err
    for rank in range(3):
        record = json.loads((tmp_path / "trace" / f"flight-rank{rank}.json").read_text())
        assert f"; {WORDS[mode]} between 2 hosts on lanes" in record["transport"]


def test_off_is_refused_unless_it_is_said_twice(tmp_path):
    (tmp_path / "it.py").touch()
    for how in (["--encryption", "off"], ["--encryption", "off", "--no-insecure"]):
        with pytest.raises(
            ConfigError,
            match=r"encryption off needs insecure on \(--insecure, or SYNCVAR_INSECURE=on",
        ):
            parse([*how, "it.py"], {}, tmp_path)
    with pytest.raises(ConfigError, match="needs insecure on"):
        RuntimeConfig.from_mapping({"SYNCVAR_ENCRYPTION": "off"}).consistent()
    for how, environ in (
        (["--insecure"], {"SYNCVAR_ENCRYPTION": "off"}),
        (["--encryption", "off"], {"SYNCVAR_INSECURE": "on"}),
    ):
        chosen = parse([*how, "it.py"], environ, tmp_path).runtime
        assert (chosen.encryption, chosen.exposure_warning) == ("off", OPENED)
        assert RuntimeConfig.from_mapping(chosen.to_mapping()).consistent() == chosen, (
            "the ranks are told both"
        )


@pytest.mark.parametrize("mode", WORDS)
def test_a_dry_run_says_the_mode(tmp_path, mode):
    (tmp_path / "it.py").touch()
    several_hosts = parse(["-H", "one:1,two:1", *options(mode)[2:], "it.py"], {}, tmp_path)
    posing = parse([*options(mode), "--workers", "2", "it.py"], {}, tmp_path)
    for text in (dry_run_hosts(several_hosts), dry_run(Job(posing, [], {}))):
        assert WORDS[mode] in text, text
        assert [line.split() for line in text.splitlines() if line.split()[:1] == ["encryption"]][
            -1
        ][1] == mode
    assert (OPENED in dry_run_hosts(several_hosts)) == (mode == "off")


def test_a_rank_of_another_mode_is_refused_before_anything_starts(launch):
    script = """
        import os
        if os.environ["SYNCVAR_RANK"] == "1":
            os.environ["SYNCVAR_ENCRYPTION"] = "control-only"
        import probe
        import syncvar as sv
        probe.failure(sv.init)
    """
    job = launch(script, workers=2, options=["--fake-hosts", "2"])
    job.wait()
    told = job.events("raised")
    assert {(event["rank"], event["error"]) for event in told} == {
        (0, "HandshakeError"),
        (1, "HandshakeError"),
    }, job
    assert all(
        "encryption: 'required' (rank 0), 'control-only' (rank 1)" in event["text"]
        for event in told
    )


JOINED = """
import sys
import numpy as np
import syncvar as sv
from syncvar.bootstrap.process import current
try:
    sv.init()
    print("met", sv.all_reduce(np.arange(3.0))[2], current().transport, flush=True)
except sv.SyncvarError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


def joined(folder, runtime, *settings):
    """Start a rank on a host of its own for each; return exit codes and outputs, rank 0 ended when the others have."""
    port = free_ports(2)
    (folder / "script.py").write_text(JOINED)
    ranks = []
    for rank, own in enumerate(settings):
        told = {
            "RANK": rank,
            "WORLD_SIZE": len(settings),
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": rank,
            "GROUP_WORLD_SIZE": len(settings),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "XDG_RUNTIME_DIR": runtime,
        }
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("SYNCVAR_")
        } | {name: str(value) for name, value in told.items()}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "script.py"],
                cwd=folder,
                env=environ | own,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    ended = []
    try:
        for one in reversed(ranks):
            out, _ = one.communicate(timeout=120)
            ended.append((one.returncode, out))
            if one.returncode:
                ranks[0].terminate()
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
            one.communicate()
    return ended[::-1]


def test_joined_ranks_need_no_secret_where_encryption_is_off_and_say_so_once(tmp_path, runtime):
    off = {"SYNCVAR_ENCRYPTION": "off", "SYNCVAR_INSECURE": "on"}
    ended = joined(tmp_path, runtime, off, off)
    assert [code for code, _ in ended] == [0, 0], ended
    assert all(
        "met 4.0" in out and "; unencrypted tcp between 2 hosts" in out for _, out in ended
    ), ended
    assert [out.count(OPENED) for _, out in ended] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["mode", "secret", "insecure"])
def test_a_joined_rank_that_has_it_otherwise_is_told_at_once(tmp_path, runtime, what):
    key = {"SYNCVAR_KEY": secrets.token_hex(32)}
    other, words = {
        "mode": (
            key | {"SYNCVAR_ENCRYPTION": "off", "SYNCVAR_INSECURE": "on"},
            "has another mode of encryption than this process",
        ),
        "secret": (
            {"SYNCVAR_KEY": secrets.token_hex(32)},
            "does this process have the same secret",
        ),
        "insecure": (key | {"SYNCVAR_ENCRYPTION": "off"}, "encryption off needs insecure on"),
    }[what]
    ended = joined(tmp_path, runtime, key, other)
    assert ended[1][0] == 3, ended
    assert words in ended[1][1], ended
