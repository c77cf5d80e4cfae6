"""Slots: bounded, reused only for equal weights and ids, given up by age."""

from __future__ import annotations

import random

import torch

from openclaw_rl.local.cache import KVShape, SlotPool

SHAPE = KVShape(layers=2, heads=1, key_dim=4, value_dim=4)


def pool(budget=1024):
    return SlotPool(SHAPE, budget, torch.float32, torch.device("cpu"))


def filled(pool, ids, tag="1"):
    """A released slot that holds `ids`."""
    slot, length = pool.acquire(ids, tag, 0)
    assert length == 0
    slot.ids[: len(ids)] = ids
    for i, token in enumerate(ids):
        slot.k[:, :, i] = token
    slot.length = len(ids)
    pool.release(slot)
    return slot


def test_the_longest_prefix_of_equal_weights_is_continued():
    p = pool()
    short, long = filled(p, [1, 2, 9, 9]), filled(p, [1, 2, 3, 4])
    other = filled(p, [1, 2, 3, 4, 5], tag="2")
    slot, length = p.acquire([1, 2, 3, 4, 5, 6], "1", 5)
    assert (slot, length) == (long, 4)
    assert not short.busy
    assert not other.busy
    assert p.acquire([7, 8], "1", 1)[1] == 0


def test_reuse_stops_at_the_limit():
    p = pool()
    slot = filled(p, [1, 2, 3, 4])
    assert p.acquire([1, 2, 3, 4], "1", 3) == (slot, 3)


def test_a_slot_that_would_lose_much_is_copied_from_instead():
    p = pool()
    long = filled(p, list(range(100)))
    slot, length = p.acquire([*range(10), 500, 501], "1", 11)
    assert slot is not long
    assert length == 10
    assert not long.busy
    assert long.length == 100
    assert torch.equal(slot.k[:, :, :10], long.k[:, :, :10])


def test_a_busy_slot_lends_a_copy():
    p = pool()
    busy = filled(p, list(range(50)))
    assert p.acquire(list(range(60)), "1", 59) == (busy, 50)
    slot, length = p.acquire(list(range(40)), "1", 39)
    assert slot is not busy
    assert length == 39
    assert torch.equal(slot.k[:, :, :39], busy.k[:, :, :39])


def test_the_longest_unused_goes_first_and_the_budget_holds():
    p = pool(576)
    first, second = filled(p, [1] * 60), filled(p, [2] * 60)
    assert p.acquire([1] * 61, "1", 60)[0] is first  # touched, so younger than `second`
    p.release(first)
    third, _ = p.acquire([3] * 120, "1", 119)
    assert p.allocated <= 576
    assert second not in p.slots
    assert first in p.slots
    assert third.capacity >= 120


def test_no_room_is_said_and_nothing_is_lost():
    p = pool(256)
    busy, _ = p.acquire([1] * 100, "1", 99)
    assert p.acquire([2] * 200, "1", 199) is None
    assert p.slots == [busy]
    assert not p.ensure(busy, 300)
    assert p.ensure(busy, 256)


def test_growing_keeps_what_was_there():
    p = pool(4096)
    slot, _ = p.acquire([1] * 10, "1", 9)
    slot.k.normal_()
    slot.v.normal_()
    slot.length = 10
    k, v = slot.k[:, :, :10].clone(), slot.v[:, :, :10].clone()
    assert p.ensure(slot, 2000)
    assert torch.equal(slot.k[:, :, :10], k)
    assert torch.equal(slot.v[:, :, :10], v)


def test_dropped_weights_are_never_matched_again():
    p = pool()
    idle = filled(p, [1, 2, 3])
    busy, _ = p.acquire([7, 8, 9], "1", 2)
    busy.length = 3
    busy.ids[:3] = [7, 8, 9]
    p.drop("1")
    assert idle not in p.slots
    assert p.match(busy.ids[:3], "1") == (None, 0)
    p.release(busy)
    assert p.slots == []


def test_random_use_never_exceeds_the_budget_nor_gives_a_wrong_prefix():
    draw, p = random.Random(1), pool(1280)
    busy = []
    for _ in range(400):
        if busy and draw.random() < 0.5:
            p.release(busy.pop(draw.randrange(len(busy))))
            continue
        ids = [draw.randrange(2) for _ in range(draw.randrange(1, 300))]
        got = p.acquire(ids, str(draw.randrange(2)), len(ids) - 1)
        if got is None:
            continue
        slot, length = got
        assert slot.ids[:length].tolist() == ids[:length]
        assert slot.k[0, 0, :length, 0].tolist() == ids[:length]
        for i in range(length, len(ids)):
            slot.ids[i] = ids[i]
            slot.k[:, :, i] = ids[i]
        slot.length = len(ids)
        busy.append(slot)
        assert p.allocated <= 1280
        assert all(s in p.slots for s in busy)
