"""What each engine has computed, as far as this process has seen."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator

Key = tuple[Hashable, ...]
"""Its first part is the kind."""

MAX_KEYS = 16_384  # about 200 bytes each


def image_key(tenant: str, image_id: str) -> Key:
    return "image", tenant, image_id


class Directory:
    """The engines that hold each key: an image, a prefix, an adapter or a session.

    A hint: an engine may have evicted what is noted here, and hold what other processes had it
    compute. The least recently used keys are dropped.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders: collections.OrderedDict[Key, int] = collections.OrderedDict()  # bits

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, keys: Iterable[Key], number: int) -> None:
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | 1 << number
            self._holders.move_to_end(key)
            if len(self._holders) > self._max_keys:
                self._holders.popitem(last=False)

    def holders(self, keys: Iterable[Key]) -> Iterator[frozenset[int]]:
        """The engines that hold each key, where there are any."""
        for key in keys:
            bits = self._holders.get(key, 0)
            if bits:
                yield frozenset(each for each in range(bits.bit_length()) if bits >> each & 1)

    def forget(self, number: int) -> None:
        """The engine of this number has lost all."""
        kept = {key: bits & ~(1 << number) for key, bits in self._holders.items()}
        self._holders = collections.OrderedDict((key, bits) for key, bits in kept.items() if bits)
