"""Which slots of host memory hold what cached blocks held. Pure Python, beside the block manager.

A slot is free, being written by a step, or known by the key of what it holds. Steps run in the
order of their launches, so a slot may be written again as soon as whatever reads it was launched.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from octavo.runtime.errors import require


class Save(NamedTuple):
    """A block whose K and V go to a slot, where they are known by the block's key."""

    block_id: int
    slot: int
    key: bytes


class Load(NamedTuple):
    """A slot whose K and V go to a block."""

    slot: int
    block_id: int


class HostTier:
    """The second chance of evicted blocks: least recently used slots are written first.

    A step that is planned saves what it evicts, see ``drafted``; what it saved is found once its
    tokens were taken, so that nothing of a failed step ever is. What is found is loaded for one
    request, into blocks of its own: those loads are due until a step of that request is launched,
    which does them before anything else. Until then the slots keep what they hold.
    """

    def __init__(self, num_slots: int, min_load_tokens: int) -> None:
        """A run of fewer than ``min_load_tokens`` tokens is not worth a load."""
        if num_slots < 1:
            raise ValueError(f"{num_slots} slots of host memory hold nothing")
        self.num_slots = num_slots
        self.min_load_tokens = min_load_tokens
        self.num_saved = 0
        self.num_loaded = 0
        self.drafted: list[Save] = []  # of the step that is being planned
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._writing: dict[int, Save] = {}
        self._due: dict[str, list[Load]] = {}
        self._readers: Counter[int] = Counter()  # loads that are due, by slot

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_used_slots(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    @property
    def writing(self) -> frozenset[Save]:
        """Saves of steps whose tokens are still to come, or that are being planned."""
        return frozenset(self._writing.values())

    @property
    def loading(self) -> Collection[str]:
        """Requests that have loads due."""
        return self._due.keys()

    def find(self, key: bytes) -> int | None:
        """The slot that holds what a key stands for."""
        return self._slots.get(key)

    def save(self, key: bytes, block_id: int) -> None:
        """Have the planned step save a block that is evicted, unless a slot holds the same or
        every slot is needed by a step that is yet to run."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = self._take_slot()
        if slot is not None:
            save = Save(block_id, slot, key)
            self._writing[slot] = save
            self.drafted.append(save)

    def hold(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Keep what is found for ``keys`` until it was loaded for a request, see ``place``."""
        # Tails are written over before heads.
        for key in reversed(keys):
            self._slots.move_to_end(key)
        loads = [Load(self._slots[key], -1) for key in keys]
        self._readers.update(load.slot for load in loads)
        self._due[request_id] = loads

    def place(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Say which blocks what is held for a request goes to."""
        loads = zip(self._due[request_id], block_ids, strict=True)
        self._due[request_id] = [Load(slot, block_id) for (slot, _), block_id in loads]

    def due(self, request_id: str) -> Sequence[Load]:
        """Loads that the next step of a request has to do."""
        return self._due.get(request_id, ())

    def withdraw(self, request_id: str) -> None:
        """Drop the loads of a request that are due."""
        loads = self._due.pop(request_id, [])
        known = set(self._slots.values()) if loads else set()
        for slot, _ in loads:
            self._readers[slot] -= 1
            if self._readers[slot] == 0:
                del self._readers[slot]
                if slot not in known:  # it was forgotten meanwhile
                    self._free.append(slot)

    def begin_plan(self) -> None:
        """Drop the saves of a plan that was never launched, or not known to be."""
        self.abandon(self.drafted)

    def launched(self, request_ids: Iterable[str]) -> None:
        """The planned step was launched: it does its saves, and the loads of these requests."""
        self.drafted = []
        for request_id in request_ids if self._due else ():  # nearly always there are none
            if request_id in self._due:
                self.num_loaded += len(self._due[request_id])
                self.withdraw(request_id)

    def commit(self, saves: Iterable[Save]) -> None:
        """A step has succeeded: what it saved may be found."""
        for save in saves:
            if self._writing.get(save.slot) is save:
                del self._writing[save.slot]
                if save.key in self._slots:
                    self._free.append(save.slot)
                else:
                    self._slots[save.key] = save.slot
                    self.num_saved += 1

    def abandon(self, saves: Iterable[Save]) -> None:
        """A step has failed: what it saved is not to be found."""
        for save in saves:
            if self._writing.get(save.slot) is save:
                del self._writing[save.slot]
                self._free.append(save.slot)
        self.drafted = [save for save in self.drafted if save.slot in self._writing]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let nobody find these, also where they are being saved."""
        forgotten = frozenset(keys)
        for key in forgotten & self._slots.keys():
            slot = self._slots.pop(key)
            if slot not in self._readers:
                self._free.append(slot)
        self.abandon([save for save in self.writing if save.key in forgotten])

    def clear(self) -> None:
        """Forget everything; loads that are due still find their slots."""
        self.forget([*self._slots, *(save.key for save in self.writing)])

    def check(self) -> None:
        """Raise InvariantError when a slot is lost, free and used, or read by the wrong ones."""
        readers = Counter(load.slot for loads in self._due.values() for load in loads)
        require(readers == self._readers, "loads that are due differ from the slots' readers")
        known = set(self._slots.values())
        require(len(known) == len(self._slots), "a slot holds two keys")
        require(len(set(self._free)) == len(self._free), "a slot is free twice")
        writing, free = self._writing.keys(), set(self._free)
        require(known.isdisjoint(writing), "a slot is found and being written")
        require(free.isdisjoint(known | writing | readers.keys()), "a slot is free and used")
        require(readers.keys().isdisjoint(writing), "a slot is being written and to be read")
        used = known | writing | readers.keys()
        require(used | free == set(range(self.num_slots)), "a slot was lost")
        require(set(self.drafted) <= self.writing, "a planned save has lost its slot")

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, slot in self._slots.items():
            if slot not in self._readers:
                del self._slots[key]
                return slot
        return None
