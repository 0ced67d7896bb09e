"""An entry's manifest: what it was built for, and the size and checksum of each of its files."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from bullet_graph.errors import CacheError, first_problem
from bullet_graph.files import open_regular

FORMAT = "bullet_graph capture cache"
VERSION = 2
REBUILD = "build it again with `bullet-graph capture build`"
MAX_MANIFEST_BYTES = 16 * 1024**2

CHUNK_BYTES = 1024**2
_HASHING_THREADS = 8
_CLOSED = ConfigDict(extra="forbid")


def digest(value: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a JSON value; the order of keys does not matter."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def entry_id(fingerprint: Mapping[str, str], plan: Mapping[str, Any]) -> str:
    """Name of the entry for a fingerprint and a plan: 16 hexadecimal digits."""
    return digest({"fingerprint": dict(fingerprint), "plan": dict(plan)})


@dataclass(frozen=True, slots=True)
class Difference:
    """A component in which an entry (``cached``) differs from what is needed (``here``); None: it has none.

    Components of the plan are named ``plan.KEY``.
    """

    component: str
    cached: str | None
    here: str | None


def printable(text: str) -> str:
    """Text without control characters, for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _require_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"printable text is required, found {text!r:.120}")
    return text


Text = Annotated[str, AfterValidator(_require_printable)]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an entry, by its path in the entry's folder; CacheError for a path that could leave the folder."""

    path: str
    num_bytes: Annotated[int, Field(strict=True, ge=0)]
    sha256: str

    __pydantic_config__ = _CLOSED

    def __post_init__(self) -> None:
        if {"", ".", ".."} & set(self.path.split("/")) or not self.path.isprintable() or "\\" in self.path:
            raise CacheError(
                f"a relative path in its simplest form, with '/' and without '..', is required; found {self.path!r:.80}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an entry holds.

    Attributes:
        fingerprint: model, hardware, software and code that its contents depend on, by name.
        plan: what is captured.
        self_check: result of the check at the build; None where nothing was compiled.
        created_utc: ISO 8601.
    """

    fingerprint: dict[Text, Text]
    plan: dict[str, Any]
    files: tuple[StoredFile, ...]
    self_check: dict[str, Any] | None
    created_utc: Text
    build_seconds: Annotated[float, Field(strict=True)]
    provenance: dict[str, Any]

    __pydantic_config__ = _CLOSED

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
        """Read a manifest, whose file is called ``where`` in messages; CacheError for any that cannot be used."""
        try:
            content = json.loads(data)
            found = content.pop("format"), content.pop("version")
            if found != (FORMAT, VERSION):
                raise CacheError(f"format {FORMAT!r}, version {VERSION} is required, found {found!r:.120}")
            manifest = TypeAdapter(cls).validate_python(content)
            manifest.to_bytes()  # refuses NaN and infinities
        except CacheError as error:
            raise CacheError(f"{where} cannot be used: {error}; {REBUILD}") from error
        # What JSON and missing keys raise; RecursionError: brackets within brackets.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"it is damaged ({type(error).__name__}: {error!s:.200})"
            if isinstance(error, ValidationError):
                problem = first_problem(error)
            raise CacheError(f"{where} cannot be used: {printable(problem)}; {REBUILD}") from error
        return manifest

    def differences(self, here: Mapping[str, str], plan: Mapping[str, Any] | None) -> tuple[Difference, ...]:
        """Where the entry differs from a fingerprint and a plan; None accepts any plan."""
        cached, needed = dict(self.fingerprint), dict(here)
        if plan is not None:
            cached |= {f"plan.{printable(key)}": json.dumps(value) for key, value in self.plan.items()}
            needed |= {f"plan.{key}": json.dumps(value) for key, value in plan.items()}
        return tuple(
            Difference(name, cached.get(name), needed.get(name))
            for name in needed | cached
            if cached.get(name) != needed.get(name)
        )


def list_files(folder: Path) -> tuple[StoredFile, ...]:
    """The files below a folder, hashed, by path."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return tuple(pool.map(lambda path: StoredFile(path, *_hash_file(folder / path)), paths))


def check_files(folder: Path, files: tuple[StoredFile, ...], copy_to: Path | None = None) -> tuple[str, ...]:
    """What is wrong with the files below a folder, in words; empty where they are as listed.

    With ``copy_to``, the bytes that were checked are written below that folder: nobody can change them afterwards.
    Hashing runs at gigabytes a second on processors with SHA instructions, so there is no quicker check by size.
    """
    listed = {file.path for file in files}
    inside = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    extra = [path.relative_to(folder).as_posix() for path in inside]
    problems = [f"{path!r:.200} is not listed in the manifest" for path in extra if path not in listed]
    if folder.is_symlink():
        problems.append(f"{folder} is a link")

    def problem(file: StoredFile) -> str | None:
        try:
            num_bytes, sha256 = _hash_file(folder / file.path, copy_to and copy_to / file.path)
        except FileNotFoundError:
            return f"{file.path} is missing"
        except OSError as error:
            return f"{file.path} cannot be read ({error})"
        if num_bytes != file.num_bytes:
            return f"{file.path} has {num_bytes} bytes instead of {file.num_bytes}"
        return None if sha256 == file.sha256 else f"{file.path} has another checksum than when it was built"

    # hashlib lets other threads run.
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return (*problems, *(found for found in pool.map(problem, files) if found is not None))


def _hash_file(path: Path, copy: Path | None = None) -> tuple[int, str]:
    num_bytes, hashed = 0, hashlib.sha256()
    with ExitStack() as opened:
        file = opened.enter_context(open_regular(path))
        if copy is not None:
            copy.parent.mkdir(parents=True, exist_ok=True)
        target = None if copy is None else opened.enter_context(copy.open("xb"))
        while chunk := file.read(CHUNK_BYTES):
            num_bytes += len(chunk)
            hashed.update(chunk)
            if target is not None:
                target.write(chunk)
    return num_bytes, hashed.hexdigest()
