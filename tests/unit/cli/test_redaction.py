"""What `syncvar report` replaces, text by text."""

import json

import pytest

from syncvar.cli.redaction import Redactor

KEY = "0123456789abcdef" * 4
ENVIRON = {
    "HOME": "/data/people/ann",
    "USER": "ann",
    "WANDB_API_KEY": "wandb0123456789",
    "DB_PASSWORD": "pa:ss word&",
    "SYNCVAR_KEY": KEY,
    "KEY_COUNT": "42",
    "AUTH_MODE": "none",
    "OPAQUE": "aB3dE5gH7jK9mN1pQ3sT5vW7",
}
SECRETS = (
    *("wandb0123456789", "pa:ss word&", KEY, "aB3dE5gH7jK9mN1pQ3sT5vW7"),
    *("hunter2hunter2", "AKIAABCDEFGHIJKLMNOP", "s3cr3tpassword"),
)


@pytest.fixture
def redactor():
    return Redactor([ENVIRON], ["node17", "node17.example.org", "a"])


@pytest.mark.parametrize(
    "text",
    [
        "login with wandb0123456789 failed",
        "connect(pa:ss word&)",
        f"key {KEY}",
        "found aB3dE5gH7jK9mN1pQ3sT5vW7 there",
        "https://ann:hunter2hunter2@example.org/x",
        "aws AKIAABCDEFGHIJKLMNOP in use",
        "password=hunter2hunter2",
        'api_key: "hunter2hunter2"',
        "train.py --token hunter2hunter2 --epochs 3",
        "--db-password=hunter2hunter2",
        "Authorization: Bearer hunter2hunter2",
        r"{\"client_secret\": \"hunter2hunter2\"}",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2hunter2\n-----END RSA PRIVATE KEY-----",
        "ghp_s3cr3tpasswordAKIAABCDEFGHIJKLMNOPxyz",
        "hf_s3cr3tpasswordAKIAABCDEFGHIJKLMNOPxyz",
        "eyJs3cr3tpassword.eyJzdWIiOiIx.c2lnbmF0dXJl",
    ],
)
def test_secrets_are_replaced(redactor, text):
    shown = redactor.text(text)
    assert not any(secret in shown for secret in SECRETS), shown
    assert "<secret" in shown
    assert redactor.counts["secrets"]


@pytest.mark.parametrize(
    "text",
    [
        "libsodium locks the keys of encrypted links",
        "all_reduce(sum, float32[12]) failed at train.py:12 in step",
        "keys: 5",
        "scipy-openblas 0.3.31.188.0, at 12:30:15",
        "127.0.0.1 and ::1",
        "OMP_NUM_THREADS=4",
        "/database/people/annex",
    ],
)
def test_ordinary_text_stays(redactor, text):
    assert redactor.text(text) == text
    assert redactor.summary() == "hosts (2)"


def test_homes_users_hosts_and_addresses_are_replaced(redactor):
    assert redactor.text("/data/people/ann/x.py of ann") == "~/x.py of <user>"
    assert redactor.text("/home/bob/y.py:3 and /Users/eve") == "~/y.py:3 and ~"
    assert redactor.text("node17: node17.example.org, node170, a") == "host1: host2, node170, a"
    shown = redactor.text("10.0.0.7 10.0.0.8 10.0.0.7:4711 fd00::7")
    assert shown == "<address 1> <address 2> <address 1>:4711 <address 3>"
    assert "home folders" in redactor.summary()


def test_names_of_hosts_stay_where_the_user_wants_them():
    redactor = Redactor([ENVIRON], None)
    assert redactor.text("node17 10.0.0.7 /data/people/ann") == "node17 10.0.0.7 ~"


def test_data_stay_data(redactor):
    data = {
        "host": "node17",
        "api_token": "short",
        "stack": [["/data/people/ann/x.py", 12, "step"]],
        "key": 5,
        "node17": {"reason": "wandb0123456789"},
    }
    shown = redactor.data(data)
    assert shown == {
        "host": "host1",
        "api_token": "<secret api_token>",
        "stack": [["~/x.py", 12, "step"]],
        "key": 5,
        "host1": {"reason": "<secret WANDB_API_KEY>"},
    }
    assert json.loads(json.dumps(shown)) == shown


def test_an_environment_keeps_its_names(redactor):
    text = redactor.environment({**ENVIRON, "OMP_NUM_THREADS": "2"})
    assert "SYNCVAR_KEY=<secret SYNCVAR_KEY>\n" in text
    assert "OMP_NUM_THREADS=2\n" in text
    assert "KEY_COUNT=42\n" in text
    assert "HOME=~\n" in text
    assert not any(secret in text for secret in SECRETS)


def test_the_content_of_a_key_file_is_a_secret(tmp_path):
    (tmp_path / "key").write_text("correcthorsebattery\n")
    redactor = Redactor([{"HOME": "/nowhere", "SYNCVAR_KEY_FILE": str(tmp_path / "key")}])
    assert redactor.text("correcthorsebattery") == "<secret SYNCVAR_KEY_FILE>"
