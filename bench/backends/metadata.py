"""Metadata of torch's distributed checkpoints, read without running code that stands in the file.

torch reads ``.metadata`` with pickle, whatever it is asked, and pickle calls what the file names. Here only what such
metadata is made of can be named.
"""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any, BinaryIO

CHECKPOINT = "torch.distributed.checkpoint"
KNOWN = {
    (f"{CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{CHECKPOINT}.metadata", "Metadata"),
    (f"{CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{CHECKPOINT}.metadata", "StorageMeta"),
    (f"{CHECKPOINT}.metadata", "TensorProperties"),
    (f"{CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
"""Modules and names that torch writes, dtypes apart: plain data, and look-ups in tables of constants."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata: nothing of it was called")


def load(file: BinaryIO) -> Any:
    """What a file of metadata holds; raises pickle.UnpicklingError if it names anything else."""
    return _Reader(file).load()


def loads(content: bytes) -> Any:
    """The same of bytes."""
    return load(io.BytesIO(content))


def restrict() -> None:
    """Have this process's torch read metadata of distributed checkpoints by ``load``."""
    from torch.distributed.checkpoint import filesystem

    # What it writes and how stays torch's own.
    filesystem.pickle = SimpleNamespace(**{**vars(pickle), "load": load, "loads": loads})  # type: ignore[attr-defined, assignment]
