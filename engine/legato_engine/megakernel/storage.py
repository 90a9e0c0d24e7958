"""Pages of requests: reservation, grafts, preemption, retirement."""

from __future__ import annotations

from legato_engine.kv_cache.eviction import EvictionCandidate, eviction_order
from legato_engine.megakernel.descriptor import Flag, RequestDescriptor, State
from legato_engine.megakernel.machine import Machine
from legato_engine.megakernel.pages import PageState

# ---------------------------------------------------------------- reservation


def can_admit(machine: Machine, request: RequestDescriptor) -> bool:
    """Whether a request fits the pool together with the running ones, without preemption.

    A request always fits alone, so that the first in the queue makes progress.
    """
    running = [each for each in machine.running() if each is not request]
    kept = sum(len(each.page_ids) for each in running)
    needed = machine.pages.pages_for(len(request.tokens) + 1)
    return not running or kept + needed <= machine.pages.num_pages


def reserve(
    machine: Machine, request: RequestDescriptor, num_positions: int, *, committed: bool
) -> bool:
    """Own pages for so many positions, writable from the first uncached one on.

    When the pool is exhausted other requests lose theirs, done ones first. Return False if the
    request itself is the next victim: it has then been preempted.
    """
    state = PageState.COMMITTED if committed else PageState.DRAFT
    while not _extend(machine, request, num_positions, state):
        victim = _next_victim(machine, request)
        if victim is request:
            preempt(machine, request)
            return False
        if victim.state is State.DONE:
            _drop(machine, victim)
        else:
            preempt(machine, victim)
    return True


def reserve_free(machine: Machine, request: RequestDescriptor, num_positions: int) -> bool:
    """Like `reserve`, from free pages only: draft tokens evict no request."""
    return _extend(machine, request, num_positions, PageState.DRAFT)


def _extend(
    machine: Machine, request: RequestDescriptor, num_positions: int, state: PageState
) -> bool:
    pages, page_ids = machine.pages, request.page_ids
    missing = pages.pages_for(num_positions) - len(page_ids)
    index = request.num_cached // pages.page_size  # of the first page that will be written
    shared = index < len(page_ids) and not pages.claim(request.request_id, page_ids[index])
    if pages.num_free < max(missing, 0) + shared:
        return False
    if shared:
        page_ids[index] = pages.copy(request.request_id, page_ids[index])
    page_ids.extend(pages.allocate(request.request_id, state) for _ in range(missing))
    return True


def settle(machine: Machine, request: RequestDescriptor) -> None:
    """After a commit, keep pages with committed positions and free the rest of the draft's."""
    kept = machine.pages.pages_for(request.num_cached)
    for page in request.page_ids[:kept]:
        machine.pages.commit(page)
    for page in request.page_ids[kept:]:
        machine.pages.release(request.request_id, page)
    del request.page_ids[kept:]


# ---------------------------------------------------------------- eviction


def _next_victim(machine: Machine, request: RequestDescriptor) -> RequestDescriptor:
    """The first in `eviction_order`, of done requests that free a page, else of running ones.

    The running ones include `request` itself.
    """
    holding = [each for each in machine.requests if each.page_ids or each is request]
    useful = [each for each in holding if each is request or _frees_a_page(machine, each)]
    retired = [each for each in useful if each.state is State.DONE]
    first = eviction_order(
        EvictionCandidate(each.request_id, each.priority, each.ema_acceptance_rate, each.last_used)
        for each in retired or useful
    )[0]
    return next(each for each in useful if each.request_id == first.candidate_id)


def _frees_a_page(machine: Machine, request: RequestDescriptor) -> bool:
    return any(len(machine.pages.holders(page)) == 1 for page in request.page_ids)


def preempt(machine: Machine, request: RequestDescriptor) -> None:
    """Take a request's pages and its place in the batch; its KV will be computed again."""
    _drop(machine, request)
    request.draft = request.sampled = ()
    request.state = State.WAITING
    machine.num_preemptions += 1


def retire(machine: Machine, request: RequestDescriptor) -> None:
    """Keep a done request's prompt KV for grafts until its pages are needed."""
    kept = machine.pages.pages_for(len(request.prompt))
    for page in request.page_ids[kept:]:
        machine.pages.release(request.request_id, page)
    del request.page_ids[kept:]
    request.num_cached = min(request.num_cached, len(request.prompt))


def _drop(machine: Machine, request: RequestDescriptor) -> None:
    for page in request.page_ids:
        machine.pages.release(request.request_id, page)
    request.page_ids.clear()
    request.num_cached = 0
    request.set_flag(Flag.GRAFTED, on=False)


# ---------------------------------------------------------------- grafts


def source_is_coming(machine: Machine, request: RequestDescriptor) -> bool:
    """Whether the graft source is about to compute the prefix that this request would borrow.

    Only earlier requests are waited for, so there is no cycle.
    """
    source = machine.find(request.graft_source_id)
    return (
        source is not None
        and source.request_id < request.request_id
        and source.state is State.PREFILL_READY
        and shared_length(source, request) > 0
    )


def shared_length(source: RequestDescriptor, request: RequestDescriptor) -> int:
    """Leading positions whose KV both need, without the position still to be computed."""
    count = 0
    for ours, theirs in zip(request.tokens[:-1], source.prompt, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def graft(machine: Machine, request: RequestDescriptor) -> None:
    """Borrow the source's pages as far as the prompts agree and its KV is valid."""
    source = machine.find(request.graft_source_id)
    if source is None or source is request:
        return
    length = min(shared_length(source, request), source.num_cached)
    for page in source.page_ids[: machine.pages.pages_for(length)]:
        machine.pages.borrow(request.request_id, page)
        request.page_ids.append(page)
    request.num_cached = length
    machine.pages.num_found += length
    request.set_flag(Flag.GRAFTED, on=length > 0)
