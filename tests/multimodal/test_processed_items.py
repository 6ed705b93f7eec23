"""Tests which processed items are kept, and for how long."""

from __future__ import annotations

import gc
import threading

from mlx_paged.multimodal.processed_items import ProcessedItems


class Item:
    pass


def test_an_item_is_processed_once_while_it_lives() -> None:
    kept: ProcessedItems[bytes] = ProcessedItems(100, len)
    a, b = Item(), Item()
    assert kept.get(a, lambda: b"a") == b"a" and kept.get(b, lambda: b"b") == b"b"
    assert kept.get(a, lambda: b"other") == b"a"
    assert (kept.num_made, kept.num_bytes, len(kept)) == (2, 2, 2)
    del a
    gc.collect()
    assert (kept.num_bytes, len(kept)) == (1, 1)


def test_another_item_at_the_same_place_is_another_item() -> None:
    kept: ProcessedItems[int] = ProcessedItems(1000, lambda _: 1)
    for i in range(300):  # (Python gives the same address again)
        item = Item()
        assert kept.get(item, lambda i=i: i) == i  # type: ignore[misc]
        del item
    gc.collect()
    assert kept.num_bytes == 0


def test_the_least_recently_used_goes_first() -> None:
    kept: ProcessedItems[bytes] = ProcessedItems(10, len)
    items = [Item() for _ in range(3)]
    kept.get(items[0], lambda: bytes(4))
    kept.get(items[1], lambda: bytes(4))
    kept.get(items[0], lambda: b"never")
    kept.get(items[2], lambda: bytes(4))
    assert kept.num_bytes == 8
    assert kept.get(items[0], lambda: b"never") == bytes(4)
    assert kept.get(items[1], lambda: b"again") == b"again"
    large = Item()
    assert kept.get(large, lambda: bytes(11)) == bytes(11) and kept.num_bytes <= 10


def test_what_has_no_weak_references_is_not_kept() -> None:
    kept: ProcessedItems[int] = ProcessedItems(10, lambda _: 1)
    assert kept.get((1, 2), lambda: 3) == 3 and len(kept) == 0


def test_threads_leave_the_books_right() -> None:
    kept: ProcessedItems[bytes] = ProcessedItems(50, len)
    shared = [Item() for _ in range(8)]

    def use() -> None:
        for i in range(500):
            kept.get(shared[i % 8], lambda: bytes(9))
            kept.get(Item(), lambda: bytes(7))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    gc.collect()
    assert kept.num_bytes == 9 * len(kept) <= 50
