"""Which servers Envoy is told of."""

from __future__ import annotations

import random

from legato_ray.membership import Membership

A, B, C = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"
HEALTH = {A: "10.0.0.1:2", B: "10.0.0.2:2", C: "10.0.0.3:2"}


def listed(*addresses: str) -> dict[str, str]:
    return {address: HEALTH[address] for address in addresses}


def test_a_server_that_serves_is_published_at_once() -> None:
    """And asked about at its health address when it is no longer listed."""
    membership = Membership([], lame_duck=2)
    assert membership.update(0, listed(A, B), ()) == {A, B}
    assert membership.unlisted([A]) == {B: HEALTH[B]}


def test_a_server_leaves_after_its_lame_duck() -> None:
    """Two seconds of NOT_SERVING, and not sooner."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    assert membership.update(1, listed(A), [B]) == {A, B}
    assert membership.update(2.9, listed(A), [B]) == {A, B}
    assert membership.update(3, listed(A), [B]) == {A}


def test_a_server_that_serves_again_stays() -> None:
    """The lame duck begins anew, by its own word and by its replica's."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    membership.update(1, listed(A), [B])
    membership.update(2, listed(A), [])
    assert membership.update(3.5, listed(A), [B]) == {A, B}
    membership.update(4, listed(A, B), [])
    assert membership.update(5.5, listed(A), [B]) == {A, B}


def test_a_directory_that_forgot_everything_costs_no_server() -> None:
    """Servers that say SERVING stay for as long as they do."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    assert membership.update(100, {}, []) == {A, B}


def test_the_last_servers_never_leave() -> None:
    """Not one by one, and not all at once; they leave when another has come."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    membership.update(1, {}, [A, B])
    assert membership.update(9, {}, [A, B]) == {A, B}
    assert membership.update(10, listed(C), [A, B]) == {C}


def test_a_new_writer_goes_on() -> None:
    """What another has published is asked at its own address until a replica names another."""
    membership = Membership([A], lame_duck=2)
    assert membership.unlisted([]) == {A: A}
    membership.update(0, listed(A), [])
    assert membership.unlisted([]) == {A: HEALTH[A]}


def test_no_history_publishes_an_empty_set_or_drops_a_server_that_serves() -> None:
    """Random listings and healths; one that leaves was silent for its whole lame duck."""
    generator = random.Random(11)
    for _ in range(200):
        membership = Membership([], lame_duck=2)
        before = membership.update(0, listed(A), ())
        silent: dict[str, int] = {}
        for now in range(1, 40):
            names = [a for a in HEALTH if generator.random() < 0.4]
            not_serving = [a for a in membership.unlisted(names) if generator.random() < 0.7]
            silent = {a: silent.get(a, now) for a in not_serving}
            after = membership.update(now, listed(*names), not_serving)
            assert after
            assert after >= set(names)
            assert all(now - silent[a] >= 2 for a in before - after)
            before = after
