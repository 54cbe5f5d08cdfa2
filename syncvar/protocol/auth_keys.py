"""Derive keys from the secret of a job, and parse a secret from text."""

from __future__ import annotations

from syncvar.core.errors import ConfigError

KEY_BYTES = 32
_HASH_BYTES = 32


def derive(secret: bytes, purpose: bytes, nbytes: int = KEY_BYTES, salt: bytes = b"") -> bytes:
    """Return a key from a secret (HKDF with SHA-256, RFC 5869); at most 8160 bytes.

    Keys for different purposes reveal nothing of each other. `salt` need not be secret.
    """
    import hashlib
    import hmac  # both load OpenSSL, which jobs on one host never need

    key = hmac.digest(salt or bytes(_HASH_BYTES), secret, hashlib.sha256)
    result = block = b""
    for number in range(1, -(-nbytes // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + purpose + bytes([number]), hashlib.sha256)
        result += block
    return result[:nbytes]


def parse_key(text: str, source: str) -> bytes:
    """Return the bytes of 64 hexadecimal digits; errors name `source`, and never the digits."""
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
