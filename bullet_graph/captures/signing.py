"""Ed25519 signatures over manifests (RFC 8032), by the ``cryptography`` package."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bullet_graph.errors import CacheError

SIGNATURE_BYTES = 64

_MAX_KEY_BYTES = 64 * 1024
_CONTEXT = b"bullet_graph capture cache manifest v1\0"
"""Precedes the signed bytes, so that a signature holds for nothing else that the same key signs."""


def sign(manifest: bytes, key_file: Path) -> bytes:
    """The signature of a manifest's bytes, which list the checksum of every file.

    Args:
        key_file: an Ed25519 private key as unencrypted PEM.

    Raises:
        CacheError: the key cannot be used, or ``cryptography`` is not installed.
    """
    ed25519, serialization = _cryptography()
    key = _load(key_file, lambda pem: serialization.load_pem_private_key(pem, password=None))
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise CacheError(
            f"the key {key_file} is no Ed25519 private key: make one with `openssl genpkey -algorithm ed25519`"
        )
    signature: bytes = key.sign(_CONTEXT + manifest)
    return signature


def require_signature(manifest: bytes, signature: bytes | None, key_files: Sequence[Path]) -> None:
    """Make sure that one of these keys signed a manifest's bytes.

    Args:
        signature: None where there is none.
        key_files: Ed25519 public keys as PEM, as ``openssl pkey -pubout`` writes them.

    Raises:
        CacheError: it is unsigned, signed by another key, or was changed; or a key cannot be used.
    """
    ed25519, serialization = _cryptography()
    keys = [_load(file, serialization.load_pem_public_key) for file in key_files]
    for file, key in zip(key_files, keys, strict=True):
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise CacheError(
                f"the key {file} is no Ed25519 public key: make one with `openssl pkey -in PRIVATE_KEY -pubout`"
            )
    if signature is None:
        raise CacheError(
            "a signature by a trusted key is required, but it is not signed: export it with --sign-key"
        )
    if not any(_holds(key, signature, manifest) for key in keys):
        names = ", ".join(map(str, key_files))
        raise CacheError(f"none of the trusted keys ({names}) made its signature, or it was changed since")


def _holds(key: Any, signature: bytes, manifest: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra

    try:
        key.verify(signature, _CONTEXT + manifest)
    except InvalidSignature:
        return False
    return True


def _load(file: Path, load: Callable[[bytes], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra

    try:
        with file.open("rb") as opened:
            return load(opened.read(_MAX_KEY_BYTES))
    except OSError as error:
        raise CacheError(f"cannot read the key {file}: {error}") from error
    # TypeError: the private key is encrypted.
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise CacheError(f"the key {file} cannot be used, unencrypted PEM is required: {error}") from error


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CacheError(
            "signatures need the cryptography package, which is not installed: pip install 'bullet-graph[sign]'"
        ) from error
    return ed25519, serialization
