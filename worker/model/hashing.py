"""A complete hash of a model file, as fast as the disk: leaves of 32 MiB hashed by a few threads.

The digest is BLAKE2b over the BLAKE2b digests of the leaves and the length, so it does not depend on the
number of threads. Caching by path, size and time is the caller's business.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.errors import ModelFileError

LEAF_BYTES = 32 << 20
ALGORITHM = "blake2b-tree32m"
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 32
_MAX_THREADS = 8

HashProgress = Callable[[int, int], None]  # bytes hashed, bytes in all


def hash_file(path: str | Path, progress: HashProgress | None = None, threads: int | None = None) -> str:
    """`"blake2b-tree32m:<64 hex digits>"` over every byte of `path`.

    `progress` is called in the calling thread after each leaf. Raises ModelFileError where the file can not
    be read or changes its length meanwhile.
    """
    try:
        size = os.stat(path).st_size
        leaves = range(0, size, LEAF_BYTES)
        root = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
        n_threads = threads or min(_MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(n_threads) as pool:
            digests = pool.map(lambda start: _hash_leaf(path, start, min(LEAF_BYTES, size - start)), leaves)
            for start, digest in zip(leaves, digests, strict=True):
                root.update(digest)
                if progress is not None:
                    progress(min(start + LEAF_BYTES, size), size)
    except OSError as error:
        raise ModelFileError(f"{path}: can not be read: {error.strerror or error}") from error
    return f"{ALGORITHM}:{root.hexdigest()}"


def _hash_leaf(path: str | Path, start: int, size: int) -> bytes:
    """The digest of `size` bytes from `start`; hashlib lets other threads run meanwhile."""
    leaf = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    buffer = bytearray(min(_READ_BYTES, size))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = size
        while left:
            count = file.readinto(memoryview(buffer)[: min(left, len(buffer))])
            if not count:
                raise ModelFileError(f"{path}: became shorter while it was read, {left} bytes are missing")
            leaf.update(memoryview(buffer)[:count])
            left -= count
    return leaf.digest()
