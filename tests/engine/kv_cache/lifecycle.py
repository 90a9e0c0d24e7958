"""Steps in the life of a sequence in a KV cache, each followed by a check."""

from legato_engine.kv_cache.manager import KVCacheManager, PrefillWork
from legato_engine.sequence import Sequence

from tests.fakes import FakeTask, make_sequence

PAGE = 4


def sequence(
    seq_id: int, prefix_length: int, key: str | None = "k", *, prompt: int = 2, max_tokens: int = 3
) -> Sequence:
    """A sequence of `prefix_length + prompt + max_tokens - 1` positions."""
    task = FakeTask(num_prompt=prompt, max_tokens=max_tokens)
    return make_sequence(seq_id, task, prefix_key=key, prefix_length=prefix_length)


def admit(manager: KVCacheManager, admitted: Sequence) -> PrefillWork:
    """Admit a sequence and launch its prefill."""
    assert manager.can_admit(admitted)
    work = manager.admit(admitted)
    manager.check()
    launch(manager, admitted)
    return work


def launch(manager: KVCacheManager, admitted: Sequence) -> None:
    """Note that its prefill is enqueued."""
    admitted.progress.last_position = admitted.length
    manager.mark_launched(admitted)
    manager.check()


def decode(manager: KVCacheManager, decoding: Sequence, *token_ids: int) -> None:
    """Commit tokens one by one and launch each; grow as needed."""
    for token_id in token_ids:
        decoding.tokens.append((token_id, (0.0, 0.0)))
        if decoding.progress.last_position >= decoding.pages.capacity:
            assert manager.grow(decoding)
        decoding.progress.last_position += 1
        manager.check()


def release(manager: KVCacheManager, ended: Sequence) -> None:
    """Release a finished sequence."""
    manager.release(ended)
    manager.check()
