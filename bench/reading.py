"""Files that a user names: read whole, if they have an end."""

from __future__ import annotations

from pathlib import Path

from bench.errors import InputError


def read(path: Path, place: str, advice: str) -> bytes:
    """The file's bytes. Raises InputError that begins with ``place`` if it cannot be read, or is no file that ends."""
    content = b""
    try:
        special = path.exists() and not (path.is_file() or path.is_dir())
        if not special:
            content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{place}: cannot be read ({reason}); {advice}") from error
    if special:
        raise InputError(f"{place}: is a device or pipe; {advice}")
    return content
