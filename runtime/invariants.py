"""What must hold between scheduler, block manager and requests whenever no step is being planned.

The tests ask after each event, and ``check_invariants`` makes the engine ask after each step.
"""

from __future__ import annotations

from octavo.runtime.block_pool import NULL_BLOCK
from octavo.runtime.errors import require
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise InvariantError, naming the first thing that is wrong."""
    scheduler.blocks.check()
    waiting = list(scheduler.waiting)
    names = [request.request_id for request in waiting]
    require(len(set(names)) == len(names), "a request waits twice")
    require(scheduler.running.keys().isdisjoint(names), "a request runs and waits")
    require(
        scheduler.blocks.holders() == scheduler.running.keys(),
        "those that hold blocks are not those that run",
    )
    scheduler.waiting.check(scheduler.running.keys())
    for request in waiting:
        _check_waiting(request)
    for name, request in scheduler.running.items():
        require(name == request.request_id, f"{name} runs under another name")
        _check_running(request, scheduler)


def _check_waiting(request: Request) -> None:
    name = request.request_id
    is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    require(is_waiting, f"{name} waits and is {request.status.value}")
    progress = (request.num_computed_tokens, request.num_slots, request.num_published_blocks)
    require(progress == (0, 0, 0), f"{name} waits and has progress in blocks: {progress}")


def _check_running(request: Request, scheduler: Scheduler) -> None:
    blocks, name = scheduler.blocks, request.request_id
    require(request.status is RequestStatus.RUNNING, f"{name} runs and is {request.status.value}")
    require(request.num_pending in (0, 1), f"{name} is {request.num_pending} tokens ahead")
    room = blocks.num_slots(name)
    require(request.num_slots == room, f"{name} has room for {room}, not {request.num_slots}")
    known = request.num_tokens + request.num_pending
    require(
        request.num_computed_tokens <= min(room, known),
        f"{name} has computed {request.num_computed_tokens} of {known} tokens with room for {room}",
    )
    num_full = request.num_computed_tokens // blocks.block_size
    require(request.num_published_blocks <= num_full, f"{name} shares what is not computed")
    for group, table in zip(blocks.groups, blocks.tables(name), strict=True):
        for block_id in table[num_full:]:
            require(blocks.is_writable(block_id), f"{name} is to write block {block_id}, shared")
        first = group.first_needed(request.num_computed_tokens) // blocks.block_size
        is_whole = NULL_BLOCK not in table[first:]
        require(is_whole, f"{name} has given back what it is to read from block {first} on")
