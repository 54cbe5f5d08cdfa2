"""Keys derived from a job's secret: the constants of the standard, and what people may write."""

import pytest

from syncvar.core.errors import ConfigError
from syncvar.protocol.auth_keys import derive, parse_key


def test_the_first_vector_of_rfc_5869():
    made = derive(
        b"\x0b" * 22,
        bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
        42,
        salt=bytes.fromhex("000102030405060708090a0b0c"),
    )
    assert made.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_the_third_vector_of_rfc_5869_without_salt_and_purpose():
    assert derive(b"\x0b" * 22, b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_a_key_is_read_and_never_shown():
    assert parse_key(" " + "0f" * 32 + "\n", "SYNCVAR_KEY") == b"\x0f" * 32
    for text in ("", "0f" * 31, "0f" * 33, "zz" * 32, "secret-word"):
        with pytest.raises(
            ConfigError, match="SYNCVAR_KEY must hold 64 hexadecimal digits"
        ) as caught:
            parse_key(text, "SYNCVAR_KEY")
        assert not text or text not in str(caught.value)
