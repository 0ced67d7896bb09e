"""Ed25519 signatures over manifests (RFC 8032), by the ``cryptography`` package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bullet_graph.errors import CacheError

SIGNATURE_BYTES = 64

_MAX_KEY_BYTES = 64 * 1024
_CONTEXT = b"bullet_graph capture cache manifest v1\0"
"""Precedes the signed bytes, so that a signature holds for nothing else that the same key signs."""


def sign(manifest: bytes, key_file: Path) -> bytes:
    """The signature of a manifest's bytes by an Ed25519 private key, unencrypted PEM.

    Raises:
        CacheError: the key cannot be used, or ``cryptography`` is not installed.
    """
    signature: bytes = _load(key_file, is_private=True).sign(_CONTEXT + manifest)
    return signature


def require_signature(manifest: bytes, signature: bytes | None, key_files: Sequence[Path]) -> None:
    """Make sure that one of these Ed25519 public keys (PEM) signed a manifest's bytes.

    Raises:
        CacheError: it is unsigned (None), signed by another key, or was changed; or a key cannot be used.
    """
    keys = [_load(file, is_private=False) for file in key_files]
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra

    if signature is None:
        raise CacheError(
            "a signature by a trusted key is required, but it is not signed: export it with --sign-key"
        )
    for key in keys:
        try:
            key.verify(signature, _CONTEXT + manifest)
            return
        except InvalidSignature:
            continue
    names = ", ".join(map(str, key_files))
    raise CacheError(f"none of the trusted keys ({names}) made its signature, or it was changed since")


def _load(file: Path, *, is_private: bool) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CacheError(
            "signatures need the cryptography package, which is not installed: pip install 'bullet-graph[sign]'"
        ) from error
    try:
        with file.open("rb") as opened:
            pem = opened.read(_MAX_KEY_BYTES)
        if is_private:
            key: object = serialization.load_pem_private_key(pem, password=None)
        else:
            key = serialization.load_pem_public_key(pem)
    except OSError as error:
        raise CacheError(f"cannot read the key {file}: {error}") from error
    # TypeError: the private key is encrypted.
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise CacheError(f"the key {file} cannot be used, unencrypted PEM is required: {error}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey if is_private else ed25519.Ed25519PublicKey):
        kind, make = ("private", "genpkey -algorithm ed25519") if is_private else ("public", "pkey -pubout")
        raise CacheError(f"the key {file} is no Ed25519 {kind} key: make one with `openssl {make}`")
    return key
