"""The secret of a job, and what is derived from it. Pure: where it comes from is the business of the rooms above."""

from __future__ import annotations

from syncvar.core.errors import ConfigError

KEY_BYTES = 32
_HASH_BYTES = 32


def derive(secret: bytes, purpose: bytes, nbytes: int = KEY_BYTES, salt: bytes = b"") -> bytes:
    """Return bytes derived from a secret: the same for the same purpose, and telling nothing of the others'.

    Args:
        secret: What both sides know.
        purpose: What the bytes are for.
        nbytes: How many, at most 8160.
        salt: Not secret; empty for none.

    Source: RFC 5869, HKDF with SHA-256.

    Example:
        >>> derive(b"secret", b"one") == derive(b"secret", b"one"), derive(b"secret", b"one") == derive(b"secret", b"two")
        (True, False)
    """
    import hashlib
    import hmac  # both load OpenSSL, and a job on one host derives nothing

    key = hmac.digest(salt or bytes(_HASH_BYTES), secret, hashlib.sha256)
    result = block = b""
    for number in range(1, -(-nbytes // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + purpose + bytes([number]), hashlib.sha256)
        result += block
    return result[:nbytes]


def parse_key(text: str, source: str) -> bytes:
    """Read a secret as people pass it on: 64 hexadecimal digits.

    Args:
        text: The digits; blanks around them do not matter.
        source: Where they come from, for the message, which never shows them.

    Raises:
        ConfigError: It is something else.
    """
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{source} must hold 64 hexadecimal digits; make them with "
            f'python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return key
