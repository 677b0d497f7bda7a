"""Checksums of published bytes.

A checksum adds up the 64-bit words of each block and hashes the sums. It detects a changed bit, swapped blocks, and a block
from another version. docs/weights.md lists its cost.
"""

import zlib

import numpy as np
import torch

from titanrl.base.choices import Verify
from titanrl.weights.manifest import Digest

_WORD = 8
_BLOCK_WORDS = 1 << 13
_STRIDE_WORDS = 1 << 15
_PAGE_WORDS = 1 << 9
_NUM_PAGES = _STRIDE_WORDS // _PAGE_WORDS


def digest(data: torch.Tensor, verify: Verify, version: int) -> Digest | None:
    """Compute the checksum of a byte tensor; return None if `verify` is `off`.

    `sampled` covers one 4 KiB page of every 256 KiB block and the incomplete block at the end. The page changes with the
    version.
    """
    if verify == "off":
        return None
    if verify == "full":
        return Digest("full", _checksum(data, _BLOCK_WORDS, slice(None)))
    page = version % _NUM_PAGES
    words = slice(page * _PAGE_WORDS, (page + 1) * _PAGE_WORDS)
    return Digest(f"sampled {page}", _checksum(data, _STRIDE_WORDS, words))


def _checksum(data: torch.Tensor, block_words: int, words: slice) -> int:
    """Return the CRC-32 of the word sums of each block, and of the bytes after the last complete block."""
    contents = data.numpy()
    num_blocks = contents.size // (block_words * _WORD)
    end = num_blocks * block_words * _WORD
    blocks = contents[:end].view(np.uint64).reshape(num_blocks, block_words)
    sums = blocks[:, words].sum(axis=1, dtype=np.uint64)
    return zlib.crc32(contents[end:].tobytes(), zlib.crc32(sums.tobytes()))
