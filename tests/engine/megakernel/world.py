"""Machines for tests: small pools, mixed profiles, and the answers that must come out of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from legato_engine.megakernel.descriptor import NO_GRAFT, RequestDescriptor
from legato_engine.megakernel.machine import Machine
from legato_engine.megakernel.models import (
    STOP_TOKEN,
    Proposer,
    SyntheticProposer,
    next_token,
)
from legato_engine.megakernel.pages import PageTable
from legato_engine.megakernel.simulator import Simulator
from legato_engine.speculative.block_policy import AdaptiveBlockPolicy, BlockPolicy


def expected(request: RequestDescriptor) -> list[int]:
    """What a request generates alone, token by token, without pages and without a proposer."""
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < request.max_tokens:
        tokens.append(next_token(request.seed, len(tokens), tokens))
        if tokens[-1] == STOP_TOKEN:
            break
    return tokens


def rates(*values: float) -> Proposer:
    """A proposer whose acceptance differs by request id."""
    return SyntheticProposer(lambda request, _: values[request.request_id % len(values)])


def make(
    requests: Sequence[RequestDescriptor],
    *,
    num_pages: int = 4096,
    page_size: int = 4,
    proposer: Proposer | None = None,
    policy: BlockPolicy | None = None,
    max_running: int = 8,
) -> Simulator:
    """A simulator with nothing done yet."""
    machine = Machine(
        requests=list(requests),
        pages=PageTable(num_pages, page_size),
        proposer=proposer or rates(0.8),
        block_policy=policy or AdaptiveBlockPolicy(),
        max_running=max_running,
    )
    return Simulator(machine)


def random_requests(draw: random.Random) -> list[RequestDescriptor]:
    """A few requests; some share the front of a prompt and name each other as graft source."""
    system = tuple(draw.randrange(1, 50) for _ in range(draw.randrange(1, 14)))
    requests = []
    for request_id in range(draw.randrange(1, 6)):
        shared = system[: draw.randrange(len(system) + 1)]
        own = tuple(draw.randrange(1, 50) for _ in range(draw.randrange(1, 6)))
        source = draw.randrange(5) if draw.random() < 0.6 else NO_GRAFT
        requests.append(
            RequestDescriptor(
                request_id,
                prompt=shared + own,
                max_tokens=draw.randrange(1, 20),
                seed=draw.randrange(3),
                priority=draw.randrange(3),
                arrival=draw.choice((0.0, 0.0, 0.002, 0.01)),
                graft_source_id=source,
            )
        )
    return requests


def check_pages(machine: Machine) -> None:
    """Every page is held once by each request that lists it, or free."""
    listed: dict[int, set[int]] = {page: set() for page in range(machine.pages.num_pages)}
    for request in machine.requests:
        assert len(set(request.page_ids)) == len(request.page_ids), "a page is listed twice"
        for page in request.page_ids:
            listed[page].add(request.request_id)
        covered = machine.pages.pages_for(request.num_cached)
        assert covered <= len(request.page_ids), "cached positions without a page"
        for position in range(request.num_cached):
            token = machine.pages.read(request.page_ids, position)
            assert token == request.tokens[position], f"position {position} holds another's KV"
    for page, holders in listed.items():
        assert machine.pages.holders(page) == holders, f"page {page} is lost or held for nobody"
    assert machine.pages.num_free == sum(not holders for holders in listed.values())
