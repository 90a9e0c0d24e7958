"""Servers that Envoy routes to; decided without waiting or asking."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Membership:
    """A server comes when it is listed, and leaves `lame_duck` seconds after it said NOT_SERVING.

    By then Envoy, which checks health more often, sends it nothing. The last one never leaves.
    """

    def __init__(self, published: Collection[str], *, lame_duck: float) -> None:
        """Start with `published`, the addresses of an earlier writer."""
        self._lame_duck = lame_duck
        self._health_addresses = {address: address for address in published}
        self._silent_since: dict[str, float] = {}

    @property
    def published(self) -> frozenset[str]:
        return frozenset(self._health_addresses)

    def unlisted(self, listed: Collection[str]) -> dict[str, str]:
        """Return published servers whose health decides, with their health addresses."""
        return {a: h for a, h in self._health_addresses.items() if a not in listed}

    def update(
        self, now: float, listed: Mapping[str, str], not_serving: Collection[str]
    ) -> frozenset[str]:
        """Return the addresses to publish.

        `listed` has health addresses by address; `not_serving` are those of `unlisted` that did not
        say SERVING.
        """
        self._health_addresses |= listed
        for address in self._health_addresses:
            if address in not_serving and address not in listed:
                self._silent_since.setdefault(address, now)
            else:
                self._silent_since.pop(address, None)
        gone = {a for a, since in self._silent_since.items() if now - since >= self._lame_duck}
        if gone >= self.published:
            gone = set()
        for address in gone:
            del self._health_addresses[address], self._silent_since[address]
        return self.published
