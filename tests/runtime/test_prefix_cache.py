"""Keys of blocks, written out by hand from their definition, and the table of them."""

from __future__ import annotations

import hashlib
import struct

import pytest

from octavo.runtime.errors import InvariantError
from octavo.runtime.prefix_cache import PrefixCache, block_key, root_key


def field(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content


def test_a_root_is_the_hash_of_its_typed_fields() -> None:
    content = field(b"M", b"sha256:12") + field(b"S", b"tenant")
    assert root_key("sha256:12", cache_salt="tenant") == hashlib.sha256(content).digest()


def test_a_block_is_the_hash_of_its_parent_and_its_tokens() -> None:
    tokens = struct.pack("<3q", 5, 0, 2**40)
    content = field(b"P", b"parent") + field(b"T", tokens)
    assert block_key(b"parent", [5, 0, 2**40]) == hashlib.sha256(content).digest()


def test_what_differs_has_another_key() -> None:
    roots = [
        root_key("model"),
        root_key("model2"),
        root_key("model", cache_salt=""),
        root_key("model", cache_salt="a"),
        root_key("model", adapter_id="a"),
        root_key("model", adapter_id="a", cache_salt="a"),
        root_key("modelS", cache_salt="a"),
        root_key("model", cache_salt="\udc80"),  # a lone surrogate is a salt like another
    ]
    blocks = [block_key(root, tokens) for root in roots for tokens in ([1], [1, 0], [0, 1], [257])]
    assert len({*roots, *blocks}) == len(roots) + len(blocks)
    assert min(map(len, roots + blocks)) * 8 >= 128


def test_the_same_tokens_after_other_tokens_are_another_block() -> None:
    root = root_key("model")
    assert block_key(block_key(root, [1, 2]), [3, 4]) != block_key(block_key(root, [2, 1]), [3, 4])


def test_a_key_is_found_until_its_block_is_dropped() -> None:
    cache = PrefixCache()
    for key, block_id in ((b"a", 5), (b"b", 3)):
        cache.put(key, block_id)
    assert [cache.find(key) for key in (b"a", b"b", b"c")] == [5, 3, None]
    cache.drop(5)
    assert [cache.find(key) for key in (b"a", b"b")] == [None, 3]
    cache.check()


def test_the_first_block_of_a_key_stays() -> None:
    cache = PrefixCache()
    cache.put(b"a", 5)
    cache.put(b"a", 6)
    assert cache.find(b"a") == 5
    assert 6 not in cache
    cache.check()


def test_a_promise_is_the_first_ones_until_it_is_kept_or_withdrawn() -> None:
    cache = PrefixCache()
    cache.promise("x", [b"a", b"b"])
    cache.promise("y", [b"b", b"c"])
    assert cache.num_promised([b"a", b"b", b"c", b"d"]) == 3
    cache.settle("y", [b"b", b"c"])  # b is not y's to settle
    assert cache.num_promised([b"a", b"b", b"c"]) == 2
    cache.withdraw("x")
    assert not cache.has_promises
    cache.check()


def test_the_checker_sees_tables_that_differ() -> None:
    cache = PrefixCache()
    cache.put(b"a", 5)
    del cache._keys[5]
    with pytest.raises(InvariantError, match="differ"):
        cache.check()
