"""The form of an exported entry: a gzip-compressed tar of which every byte but the contents is determined.

Members are ``manifest.json``, ``manifest.sig`` if it is signed, and ``artifacts/000000`` and so on, in the
manifest's order. Their headers tell nothing that the manifest does not, so a reader compares them with what it would
have written. No name in the archive ever becomes a path.
"""

import tarfile
import zlib
from io import BufferedReader, BufferedWriter

from bullet_graph.captures.files import CHUNK_BYTES
from bullet_graph.errors import CacheError

MANIFEST_MEMBER = "manifest.json"
SIGNATURE_MEMBER = "manifest.sig"

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
"""A tar ends with two blocks of zeros."""

# Of shared libraries, level 4 leaves 34 % at 60 MiB/s; level 6 leaves 33 % at 26, lzma's lowest 26 % at 22.
_LEVEL = 4
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def artifact_member(index: int) -> str:
    """Name of the member that holds the manifest's artifact of this index."""
    return f"artifacts/{index:06d}"


def member_header(name: str, num_bytes: int) -> bytes:
    """The ustar header (POSIX.1-1988) of a regular file that belongs to nobody; 512 bytes."""
    fields = (
        name.encode("ascii").ljust(100, b"\0"),
        b"0000644\0" + 2 * b"0000000\0",
        f"{num_bytes:011o}\0{0:011o}\0".encode("ascii"),
        8 * b" ",
        tarfile.REGTYPE + bytes(100) + b"ustar\x0000",
    )
    header = b"".join(fields).ljust(BLOCK_BYTES, b"\0")
    return header[:148] + f"{sum(header):06o}\0 ".encode("ascii") + header[156:]


def padding(num_bytes: int) -> bytes:
    """The zeros that fill a content of this size up to a whole block."""
    return bytes(-num_bytes % BLOCK_BYTES)


class ArchiveWriter:
    """Compresses what is written into a file; the same content gives the same bytes."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._compressor = zlib.compressobj(_LEVEL, wbits=_GZIP_WINDOW)

    def write(self, data: bytes) -> None:
        """Append to the tar."""
        self._file.write(self._compressor.compress(data))

    def finish(self) -> None:
        """Write the tar's end and the rest of the compressed stream."""
        self.write(END)
        self._file.write(self._compressor.flush())


class ArchiveReader:
    """Decompresses a file, a bounded piece at a time."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._decompressor = zlib.decompressobj(wbits=_GZIP_WINDOW)

    def read(self, num_bytes: int) -> bytes:
        """Up to so many bytes of the tar, 1 MiB at most; none at its end.

        Raises:
            CacheError: the compressed stream is damaged or ends early.
            OSError: the file cannot be read.
        """
        wanted = min(num_bytes, CHUNK_BYTES)
        while wanted and not self._decompressor.eof:
            compressed = self._decompressor.unconsumed_tail or self._file.read(CHUNK_BYTES)
            try:
                data = self._decompressor.decompress(compressed, wanted)
            except zlib.error as error:
                raise CacheError(f"it is no gzip file, or damaged ({error})") from error
            if data:
                return data
            if not compressed and not self._decompressor.eof:
                raise CacheError("it is truncated")
        return b""

    def read_exactly(self, num_bytes: int) -> bytes:
        """Just so many bytes of the tar.

        Raises:
            CacheError: as :meth:`read`; also where fewer are left.
        """
        pieces: list[bytes] = []
        while num_bytes:
            piece = self.read(num_bytes)
            if not piece:
                raise CacheError("it is truncated")
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    def require_end(self) -> None:
        """Make sure that nothing follows, in the tar or after the compressed stream.

        Raises:
            CacheError: something does.
        """
        if self.read(1) or self._decompressor.unused_data or self._file.read(1):
            raise CacheError("there is something after its end")


def describe_member(header: bytes, expected: str) -> str:
    """Why a header is not that of the member ``expected``, in words."""
    if header == bytes(BLOCK_BYTES):
        return f"{expected} is missing: it ends before"
    try:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "backslashreplace")
    except tarfile.TarError as error:
        return f"the header of {expected} is damaged ({error})"
    name = f"{member.name!r:.100}"
    if member.name.startswith("/"):
        return f"member {name} has an absolute path"
    if ".." in member.name.split("/"):
        return f"member {name} has '..' in its path"
    if member.issym() or member.islnk():
        return f"member {name} is a link"
    if not member.isreg():
        return f"member {name} is no regular file"
    if member.name != expected:
        return f"member {name} is not listed in the manifest, or not in its order: {expected} is required"
    return (
        f"member {name} has another size than the manifest says ({member.size} bytes), or an unusual header"
    )
