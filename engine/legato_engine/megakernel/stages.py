"""The six stages, in the order in which one iteration of the device loop runs them.

    stage_scheduler   who gets a place
    stage_kv          pressure flags; block sizes where requests are weighed against each other
    stage_prefill     PREFILL_READY -> DECODE_READY: KV of the prompt, borrowed or computed
    stage_decode      DECODE_READY  -> VERIFY_READY: propose a block, take draft pages for it
    stage_spec_verify VERIFY_READY  -> COMMIT_READY: one forward over the block, accept a prefix
    stage_commit      COMMIT_READY  -> DECODE_READY or DONE: keep what stands, discard the rest

All but the first two work on one request, and only they change its state.
"""

from __future__ import annotations

from legato_engine.megakernel import storage
from legato_engine.megakernel.descriptor import Flag, RequestDescriptor, State
from legato_engine.megakernel.machine import Machine
from legato_engine.megakernel.models import CONTEXT, next_token


def stage_scheduler(machine: Machine) -> None:
    """Give free places to those who wait: higher priority first, then who came first."""
    waiting = [
        request
        for request in machine.requests
        if request.state is State.WAITING and request.arrival <= machine.now
    ]
    waiting.sort(key=lambda each: (-each.priority, each.arrival, each.request_id))
    for request in waiting[: machine.max_running - len(machine.running())]:
        if not storage.has_room(machine, request):
            return  # whoever comes later must not starve it
        request.state = State.PREFILL_READY


def stage_kv(machine: Machine) -> None:
    """Tell every request whether the pool is under pressure, and let the policy weigh them."""
    pressed = machine.pages.is_under_pressure
    for request in machine.requests:
        request.set_flag(Flag.KV_PRESSURE, on=pressed)
    decoding = [each for each in machine.requests if each.state is State.DECODE_READY]
    if decoding:
        machine.block_policy.allot(decoding)


def stage_prefill(machine: Machine, request: RequestDescriptor) -> None:
    """KV of all tokens but the newest: borrowed where the graft source has it, else computed.

    After a preemption that includes what had been generated. A source that is about to compute the
    shared prefix itself is waited for.
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
    """Propose a block, no longer than what is left to generate, and take pages for it.

    Without pages for the whole block a shorter one is tried; without any for a single token the
    request has been preempted and waits.
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
    """One forward over the newest token and the draft; accept what the target agrees with.

    The policy learns here, as the last thing before the commit.
    """
    if request.state is not State.VERIFY_READY:
        return
    fed = (request.tokens[-1], *request.draft)
    first = request.num_cached
    sampled = []
    for position, token in enumerate(fed, start=first):
        machine.pages.write(request.request_id, request.page_ids, position, token)
        context = [
            machine.pages.read(request.page_ids, behind)
            for behind in range(max(0, position + 1 - CONTEXT), position + 1)
        ]
        sampled.append(next_token(request.seed, position + 1, context))
    request.sampled = tuple(sampled)
    request.accepted_prefix_len = machine.acceptance.accepted_prefix(request.draft, sampled)
    machine.block_policy.update(request, request.accepted_prefix_len, len(request.draft))
    machine.num_fed += len(fed)
    machine.longest_block = max(machine.longest_block, len(request.draft))
    request.last_used = machine.iteration
    request.state = State.COMMIT_READY


def stage_commit(machine: Machine, request: RequestDescriptor) -> None:
    """Commit the accepted tokens and the target's next; pages of the rejected ones go back."""
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
"""Those that run for every request with a place."""
