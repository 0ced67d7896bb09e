"""An entry's manifest: what it was built for, and the size and checksum of each of its files."""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from bullet_graph.errors import CacheError

FORMAT = "bullet_graph capture cache"
VERSION = 2
REBUILD = "build it again with `bullet-graph capture build`"

MAX_MANIFEST_BYTES = 16 * 1024**2
MAX_FILES = 20_000
MAX_TOTAL_BYTES = 64 * 1024**3

_MAX_PATH_BYTES, _MAX_PART_BYTES = 1024, 255
_MAX_VALUE_CHARACTERS = 500
_HASHING_THREADS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMPONENT = re.compile(r"[a-z][a-z0-9_]{0,63}")


def digest(value: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a JSON value; the order of keys does not matter."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def entry_id(fingerprint: Mapping[str, str], plan: Mapping[str, Any]) -> str:
    """Name of the entry for a fingerprint and a plan: 16 hexadecimal digits."""
    return digest({"fingerprint": dict(fingerprint), "plan": dict(plan)})


@dataclass(frozen=True, slots=True)
class Difference:
    """A component in which an entry differs from what is needed.

    Attributes:
        component: its name; ``plan.KEY`` for a key of the plan.
        cached: the entry's value; None where it has none.
        here: the value needed; None likewise.
    """

    component: str
    cached: str | None
    here: str | None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an entry.

    Attributes:
        path: relative to the entry's folder of files, with ``/``.
        num_bytes: its size.
        sha256: 64 hexadecimal digits.

    Raises:
        CacheError: the path could leave the folder, or a value is impossible.
    """

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parts = self.path.split("/") if isinstance(self.path, str) else []
        if (
            not parts
            or any(
                part in ("", ".", "..") or len(part.encode(errors="replace")) > _MAX_PART_BYTES
                for part in parts
            )
            or not self.path.isprintable()
            or "\\" in self.path
            or len(self.path.encode()) > _MAX_PATH_BYTES
        ):
            raise CacheError(
                f"a relative path in its simplest form, with '/' and without '..', is required; found {self.path!r:.80}"
            )
        if type(self.num_bytes) is not int or not 0 <= self.num_bytes <= MAX_TOTAL_BYTES:
            raise CacheError(f"{self.path}: num_bytes must be a size, found {self.num_bytes!r:.80}")
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise CacheError(f"{self.path}: sha256 must be 64 hexadecimal digits, found {self.sha256!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an entry holds.

    Attributes:
        fingerprint: model, hardware, software and code that its contents depend on, as text by name.
        plan: what is captured, as a JSON object.
        files: its files.
        self_check: result of the check at the build, as a JSON object; None where nothing was compiled.
        created_utc: ISO 8601.
        build_seconds: duration of the build.
        provenance: of the build, as a JSON object.

    Raises:
        CacheError: a value has a wrong type or is out of range.
    """

    fingerprint: dict[str, str]
    plan: dict[str, Any]
    files: tuple[StoredFile, ...]
    self_check: dict[str, Any] | None
    created_utc: str
    build_seconds: float
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        for name in ("fingerprint", "plan", "provenance"):
            _require(type(getattr(self, name)) is dict, name, "an object", getattr(self, name))
        _require(
            self.self_check is None or type(self.self_check) is dict,
            "self_check",
            "an object",
            self.self_check,
        )
        for name, value in self.fingerprint.items():
            # Shown on terminals: an imported manifest must not bring control characters.
            good = isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_VALUE_CHARACTERS
            _require(
                good and bool(_COMPONENT.fullmatch(name)),
                "fingerprint",
                "short printable texts",
                {name: value},
            )
        seconds = self.build_seconds
        good = type(seconds) in (int, float) and math.isfinite(seconds) and seconds >= 0
        _require(good, "build_seconds", "finite and at least 0", seconds)
        moment = None
        with suppress(ValueError, TypeError):
            moment = datetime.fromisoformat(self.created_utc)
        _require(
            moment is not None and moment.tzinfo is not None, "created_utc", "a UTC time", self.created_utc
        )
        _require(len(self.files) <= MAX_FILES, "files", f"at most {MAX_FILES}", len(self.files))
        _require(
            self.num_bytes <= MAX_TOTAL_BYTES, "files", f"at most {MAX_TOTAL_BYTES} bytes", self.num_bytes
        )
        paths = {file.path for file in self.files}
        _require(len(paths) == len(self.files), "files", "different paths", len(self.files))

    @property
    def entry_id(self) -> str:
        """Name of the entry: 16 hexadecimal digits."""
        return entry_id(self.fingerprint, self.plan)

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """The JSON text of the manifest's file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode("ascii")

    @classmethod
    def parse(cls, data: bytes, where: str) -> "Manifest":
        """Read a manifest strictly: every key, every type, no others.

        Args:
            where: the file, for messages.

        Raises:
            CacheError: it is damaged, of another version, or lists what it must not.
        """
        try:
            _require(
                len(data) <= MAX_MANIFEST_BYTES, "its size", f"at most {MAX_MANIFEST_BYTES} bytes", len(data)
            )
            content = json.loads(data)
            found = content.pop("format"), content.pop("version")
            _require(found == (FORMAT, VERSION), "format and version", f"{FORMAT!r} and {VERSION}", found)
            files = tuple(StoredFile(**file) for file in content.pop("files"))
            manifest = cls(files=files, **content)
            assert manifest.entry_id  # all of it is plain JSON
        except CacheError as error:
            raise CacheError(f"{where} cannot be used: {error}; {REBUILD}") from error
        # What JSON, missing keys, unknown keys and wrong types raise; RecursionError: brackets within brackets.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CacheError(
                f"{where} cannot be used: it is damaged ({type(error).__name__}: {error!s:.200}); {REBUILD}"
            ) from error
        return manifest

    def differences(self, here: Mapping[str, str], plan: Mapping[str, Any] | None) -> tuple[Difference, ...]:
        """Where the entry differs from what is needed.

        Args:
            here: the fingerprint needed.
            plan: the plan needed; None accepts any.
        """
        found = _differences("", self.fingerprint, here)
        if plan is None:
            return found
        cached, needed = (
            {key: json.dumps(value) for key, value in each.items()} for each in (self.plan, plan)
        )
        return found + _differences("plan.", cached, needed)


def list_files(folder: Path) -> tuple[StoredFile, ...]:
    """The files below a folder, hashed, by path."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return tuple(pool.map(lambda path: StoredFile(path, *hash_file(folder / path)), paths))


def check_files(folder: Path, files: tuple[StoredFile, ...]) -> tuple[str, ...]:
    """What is wrong with the files below a folder, in words; empty where they are as listed.

    Hashing runs at gigabytes a second on processors with SHA instructions, so there is no quicker check by size.
    """
    listed = {file.path for file in files}
    inside = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    extra = [path.relative_to(folder).as_posix() for path in inside]
    problems = [f"{path!r:.200} is not listed in the manifest" for path in extra if path not in listed]

    def problem(file: StoredFile) -> str | None:
        try:
            num_bytes, sha256 = hash_file(folder / file.path)
        except FileNotFoundError:
            return f"{file.path} is missing"
        except OSError as error:
            return f"{file.path} cannot be read ({error})"
        if num_bytes != file.num_bytes:
            return f"{file.path} has {num_bytes} bytes instead of {file.num_bytes}"
        return None if sha256 == file.sha256 else f"{file.path} has another checksum than when it was built"

    if folder.is_symlink():
        problems.append(f"{folder} is a link")
    # hashlib lets other threads run.
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return (*problems, *(found for found in pool.map(problem, files) if found is not None))


def hash_file(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a regular file.

    Raises:
        OSError: it cannot be read, or is a link or a special file.
    """
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is a link, a device or a pipe.
    """
    # O_NONBLOCK: a pipe without a writer would block.
    file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def _differences(prefix: str, cached: Mapping[str, str], here: Mapping[str, str]) -> tuple[Difference, ...]:
    return tuple(
        Difference(f"{prefix}{name}", cached.get(name), here.get(name))
        for name in dict.fromkeys((*here, *cached))
        if cached.get(name) != here.get(name)
    )


def _require(good: bool, what: str, required: str, found: object) -> None:
    if not good:
        raise CacheError(f"{what} must be {required}, found {found!r:.120}")
