"""The six stages, in the order of one iteration of the device loop.

    stage_scheduler   admission to the batch
    stage_kv          pressure flags; block sizes that depend on several requests
    stage_prefill     PREFILL_READY -> DECODE_READY: KV of the prompt, borrowed or computed
    stage_decode      DECODE_READY  -> VERIFY_READY: propose a block, take draft pages for it
    stage_spec_verify VERIFY_READY  -> COMMIT_READY: one forward over the block, accept a prefix
    stage_commit      COMMIT_READY  -> DECODE_READY or DONE: keep accepted tokens, free the rest

All but the first two work on one request, and only they change its state.
"""

from __future__ import annotations

from legato_engine.megakernel import storage
from legato_engine.megakernel.descriptor import Flag, RequestDescriptor, State
from legato_engine.megakernel.machine import Machine
from legato_engine.megakernel.models import CONTEXT, next_token


def stage_scheduler(machine: Machine) -> None:
    """Admit waiting requests to the batch, by priority, then by arrival."""
    waiting = [
        request
        for request in machine.requests
        if request.state is State.WAITING and request.arrival <= machine.now
    ]
    waiting.sort(key=lambda each: (-each.priority, each.arrival, each.request_id))
    for request in waiting[: machine.max_running - len(machine.running())]:
        if not storage.can_admit(machine, request):
            return  # later requests must not overtake it
        request.state = State.PREFILL_READY


def stage_kv(machine: Machine) -> None:
    """Update every request's pressure flag, and let the policy allot block sizes."""
    pressed = machine.pages.is_under_pressure
    for request in machine.requests:
        request.set_flag(Flag.KV_PRESSURE, on=pressed)
    decoding = [each for each in machine.requests if each.state is State.DECODE_READY]
    if decoding:
        machine.block_policy.allot(decoding)


def stage_prefill(machine: Machine, request: RequestDescriptor) -> None:
    """Provide KV of all tokens but the newest, from the graft source where it has them.

    After a preemption that includes generated tokens. The request waits for a source that is about
    to compute the shared prefix.
    """
    if request.state is not State.PREFILL_READY or storage.source_is_coming(machine, request):
        return
    if request.num_cached == 0:
        storage.graft(machine, request)
    needed = len(request.tokens) - 1
    if not storage.reserve(machine, request, needed, committed=True):
        return
    for position in range(request.num_cached, needed):
        machine.pages.write(
            request.request_id, request.page_ids, position, request.tokens[position]
        )
    machine.num_prefilled += needed - request.num_cached
    machine.pages.num_computed += needed - request.num_cached
    request.num_cached = needed
    machine.block_policy.begin(request)
    request.state = State.DECODE_READY


def stage_decode(machine: Machine, request: RequestDescriptor) -> None:
    """Propose a block of at most the tokens left, and take pages for it.

    Without pages for the whole block it is halved. Without a page for a single token the request
    has been preempted.
    """
    if request.state is not State.DECODE_READY:
        return
    most = min(request.current_block_size, request.num_left - 1)
    draft = machine.proposer.propose(request, most) if most > 0 else ()
    first = request.num_cached
    if not storage.reserve(machine, request, first + 1, committed=False):
        return
    while draft and not storage.reserve_free(machine, request, first + 1 + len(draft)):
        draft = draft[: len(draft) // 2]
    request.draft = draft
    request.block_size_history.append(len(draft))
    request.state = State.VERIFY_READY


def stage_spec_verify(machine: Machine, request: RequestDescriptor) -> None:
    """Run one forward over the newest token and the draft, and accept the target's prefix.

    The policy is updated here, before the commit.
    """
    if request.state is not State.VERIFY_READY:
        return
    scheduled = (request.tokens[-1], *request.draft)
    first = request.num_cached
    sampled = []
    for position, token in enumerate(scheduled, start=first):
        machine.pages.write(request.request_id, request.page_ids, position, token)
        context = [
            machine.pages.read(request.page_ids, earlier)
            for earlier in range(max(0, position + 1 - CONTEXT), position + 1)
        ]
        sampled.append(next_token(request.seed, position + 1, context))
    request.sampled = tuple(sampled)
    request.accepted_prefix_len = machine.acceptance.accepted_prefix(request.draft, sampled)
    machine.block_policy.update(request, request.accepted_prefix_len, len(request.draft))
    machine.num_scheduled += len(scheduled)
    machine.longest_block = max(machine.longest_block, len(request.draft))
    request.last_used = machine.iteration
    request.state = State.COMMIT_READY


def stage_commit(machine: Machine, request: RequestDescriptor) -> None:
    """Commit the accepted tokens and the target's next; free pages of rejected tokens."""
    if request.state is not State.COMMIT_READY:
        return
    tokens = machine.acceptance.committed(
        request.sampled, request.accepted_prefix_len, request.num_left
    )
    request.tokens.extend(tokens)
    request.num_cached += len(tokens)
    request.draft = request.sampled = ()
    storage.settle(machine, request)
    over = request.num_left == 0 or tokens[-1] == machine.acceptance.stop_token
    request.state = State.DONE if over else State.DECODE_READY
    if over:
        storage.retire(machine, request)


STAGES = (stage_prefill, stage_decode, stage_spec_verify, stage_commit)
"""The stages of every running request."""
