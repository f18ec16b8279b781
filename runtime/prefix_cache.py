"""Which blocks hold which tokens: keys of full blocks, and the table from keys to blocks.

A block's K and V depend on every token up to its end, on the model, and on nothing else. So its key
is a hash chained over the blocks before it, rooted in what the computation is: the artifact's
content id, an adapter, a salt that parts tenants from each other.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from struct import pack

from octavo.runtime.errors import require

KEY_BYTES = 32  # SHA-256, whole: nobody can make two contexts share a key
_TOKEN_IDS = "q"


def digest(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """SHA-256 over (type, content) fields, each with its length, so that no two lists of fields
    give the same bytes."""
    hasher = hashlib.sha256()
    for kind, content in fields:
        hasher.update(pack("<cQ", kind, len(content)))
        hasher.update(content)
    return hasher.digest()


def root_key(
    content_id: str, *, adapter_id: str | None = None, cache_salt: str | None = None
) -> bytes:
    """What a prompt's first block is chained to. None is not the empty string."""
    fields = [(b"M", content_id.encode())]
    if adapter_id is not None:
        fields.append((b"A", adapter_id.encode()))
    if cache_salt is not None:
        fields.append((b"S", cache_salt.encode("utf-8", "surrogatepass")))
    return digest(fields)


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block of these tokens after the block, or root, of key ``parent``."""
    return digest(((b"P", parent), (b"T", array(_TOKEN_IDS, token_ids).tobytes())))


class PrefixCache:
    """Keys of blocks that are computed, and of those that are about to be.

    A key stands for one block: when two requests computed the same, the second block stays private.
    A promise says that a step which is planned or runs computes a key: whoever needs that block
    may rather wait for it than compute it as well.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._promised: dict[bytes, str] = {}  # to the request that computes it
        self._promises: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    def find(self, key: bytes) -> int | None:
        """The block that holds what a key stands for."""
        return self._blocks.get(key)

    def known(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of all of ``keys`` that are there."""
        return [self._blocks[key] for key in keys if key in self._blocks]

    def put(self, key: bytes, block_id: int) -> None:
        """Say what a block holds, unless another block is known to hold the same."""
        if key not in self._blocks and block_id not in self._keys:
            self._blocks[key] = block_id
            self._keys[block_id] = key

    def drop(self, block_id: int) -> bytes | None:
        """Forget what a block holds: its key, or None when that is not known."""
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self._blocks[key]
        return key

    def clear(self) -> None:
        """Forget what all blocks hold."""
        self._blocks.clear()
        self._keys.clear()

    def promise(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Say that a request computes ``keys`` next; one that is promised already stays so."""
        own = self._promises.setdefault(request_id, set())
        for key in keys:
            if self._promised.setdefault(key, request_id) == request_id:
                own.add(key)

    @property
    def has_promises(self) -> bool:
        return bool(self._promised)

    def num_promised(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys``, from the first on, are promised."""
        for count, key in enumerate(keys):
            if key not in self._promised:
                return count
        return len(keys)

    def settle(self, request_id: str, keys: Iterable[bytes]) -> None:
        """Take a request's promise of ``keys`` back: kept or not, it computes them no more."""
        own = self._promises.get(request_id)
        if not own:
            return
        for key in own.intersection(keys):
            own.remove(key)
            del self._promised[key]

    def withdraw(self, request_id: str) -> None:
        """Take all promises of a request back."""
        for key in self._promises.pop(request_id, ()):
            del self._promised[key]

    def check(self) -> None:
        """Raise InvariantError when the tables do not mirror each other."""
        mirrored = {block_id: key for key, block_id in self._blocks.items()}
        require(mirrored == self._keys, "keys of blocks and blocks of keys differ")
        promised = {key: owner for owner, keys in self._promises.items() for key in keys}
        require(promised == self._promised, "promises differ from those who made them")

    @property
    def promisers(self) -> frozenset[str]:
        """Requests that have promised something."""
        return frozenset(owner for owner, keys in self._promises.items() if keys)

    @property
    def block_ids(self) -> frozenset[int]:
        """Blocks whose content is known."""
        return frozenset(self._keys)
