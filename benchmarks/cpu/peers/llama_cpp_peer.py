"""llama.cpp by llama-cpp-python: `PYTHON llama_cpp_peer.py FILE TYPE - THREADS`.

TYPE is `file` for the file as it is, or the type that llama.cpp makes of it first, as `Q8_0`. Run
as a file, because its Python need not have this package's requirements.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import turn  # type: ignore[import-not-found]  # beside this file

_SEQUENCES = 4
_CONTEXT = 2048


class LlamaCpp:
    """A model and a context of several sequences."""

    def __init__(self, path: str, threads: int) -> None:
        model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = _SEQUENCES * _CONTEXT
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = _SEQUENCES
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._batch = llama_cpp.llama_batch_init(_CONTEXT, 0, _SEQUENCES)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.versions = {"llama_cpp_python": llama_cpp.__version__}

    def prefill(self, prompt: Sequence[int]) -> int:
        return self._start([prompt])[0]

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> turn.Spent:
        tokens = self._start(prompts)
        start = turn.clock()
        for step in range(steps):
            rows = [(token, len(prompts[seq]) + step, seq) for seq, token in enumerate(tokens)]
            tokens = self._run(rows, wanted=range(len(rows)))
        return turn.since(start)

    def _start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        tokens = []
        for seq, prompt in enumerate(prompts):
            rows = [(token, position, seq) for position, token in enumerate(prompt)]
            tokens += self._run(rows, wanted=[len(rows) - 1])
        return tokens

    def _run(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Run tokens at positions of sequences, and return the likeliest after those wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, seq) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq
            batch.logits[at] = at in wanted
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._likeliest(at) for at in wanted]

    def _likeliest(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def _made(path: str, kind: str, folder: str) -> str:
    """Write the file again with tensors of another type."""
    made = str(Path(folder) / "model.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize = True
    if llama_cpp.llama_model_quantize(path.encode(), made.encode(), settings) != 0:
        raise RuntimeError(f"llama.cpp makes no {kind} of {path}")
    return made


def main() -> None:
    """Load, and take turns."""
    path, kind, _, threads = sys.argv[1:5]
    llama_cpp.llama_log_set(_silent, None)
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        chosen = path if kind == "file" else _made(path, kind, folder)
        turn.serve(LlamaCpp(chosen, int(threads)))


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # of an untyped library
def _silent(_level: int, _text: bytes, _data: object) -> None:
    return


if __name__ == "__main__":
    main()
