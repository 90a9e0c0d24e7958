"""Which part of a step makes large steps wrong: `python -m tests.gpu.wrong_steps`.

For a defect that a tree before 2026-11-24 had and this one has not (docs/dev/log.md):
legato-tiny with its own draft answered wrongly when a step had some 57 tokens or more. Each variant
changes one thing and runs in a process of its own, because a wrong step leaves the process wrong;
`--at-once` of them share the GPU. A line has the requests that differ from plain decoding with
draft tokens, those that differ after that without, and the model's tensors that something wrote to.

`compute-sanitizer --tool memcheck python -m tests.gpu.wrong_steps --only captured` looks for writes
out of bounds (so does `--tool initcheck` for reads); add `--child` to stay in one process.
"""

# mypy: disable-error-code="method-assign, misc, no-untyped-def, arg-type, attr-defined"
# Its variants exchange functions of the engine while it runs.

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from legato_engine.config import LOOKUP_DRAFT, SPECULATION_OFF, EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.kernels.cuda import attention, draft_layer, module, skinny_gemm
from legato_engine.models.moondream import decode_step
from legato_engine.models.moondream import draft as moondream_draft
from legato_engine.runtime import graphs

from benchmarks.speculation.run import Run, with_settings
from benchmarks.speculation.workloads import real_requests, sample_images

STREAMS, SETTING = 8, "fixed:8"  # steps of 72 tokens: passes of 32, 32 and 8


def _no_overlap() -> None:
    """Every kernel begins when the one before it has ended."""
    of = module._attributes
    module._attributes = lambda cluster, overlap, cooperative: of(cluster, False, cooperative)


def _no_overlap_of_the_draft() -> None:
    launch = module.Kernel.launch

    def alone(self: module.Kernel, *arguments: object, overlap: bool = False, **named: object):
        return launch(self, *arguments, overlap=overlap and not self.drafts, **named)

    kernel = module.Module.kernel

    def named(self: module.Module, name: str, *, shared: int = 0) -> module.Kernel:
        made = kernel(self, name, shared=shared)
        made.drafts = name.startswith("draft_")
        return made

    module.Module.kernel, module.Kernel.launch = named, alone


def _passes_of(tokens: int) -> Callable[[], None]:
    """Narrower passes over the weights; 24 needs no kernel of four tiles."""

    def change() -> None:
        decode_step.MoondreamStep._passes = lambda self, batch: [
            slice(first, min(first + tokens, batch)) for first in range(0, batch, tokens)
        ]

    return change


def _host_switch() -> None:
    """Branches are captured; the host reads which of them to replay."""
    capture = graphs.GraphRunner.captured

    def work(self, make, *shape):
        if make.__name__ == "drafting":
            key = (make, *shape)
            if key not in self._captured:
                self._captured[key] = make(*shape)
            return self._captured[key]
        return capture(self, make, *shape)

    graphs.GraphRunner.captured = work


def _no_clusters() -> None:
    skinny_gemm.cluster = lambda batch: 1


def _one_block_a_head() -> None:
    attention.splits_for = lambda pairs: 1


def _fresh_buffers() -> None:
    """The draft's buffers are never those of another number of rows."""
    propose = draft_layer.DraftLayerKernels.propose

    def checked(self, history, draft_RK):
        before = self._buffers
        propose(self, history, draft_RK)
        assert before is None or self._buffers is before, "buffers made anew"

    draft_layer.DraftLayerKernels.propose = checked


def _torch_draft() -> None:
    moondream_draft._by_kernels = lambda *arguments: None


def _nothing() -> None:
    pass


VARIANTS: dict[str, Callable[[], None]] = {
    "captured": _nothing,
    "eager": _nothing,
    "lookup": _nothing,
    "plain 64": _nothing,
    "torch draft": _torch_draft,
    "no overlap": _no_overlap,
    "no overlap of the draft": _no_overlap_of_the_draft,
    "passes of 24": _passes_of(24),
    "passes of 8": _passes_of(8),
    "host switch": _host_switch,
    "no clusters": _no_clusters,
    "one block a head": _one_block_a_head,
    "fresh buffers": _fresh_buffers,
}


def run(name: str, device: str, streams: int, setting: str) -> str:
    """Run one variant in this process; return its line."""
    VARIANTS[name]()
    config = EngineConfig(
        device=device,
        max_running=streams,
        num_pages=4096,
        crops_per_launch=0,
        cuda_graphs=name != "eager",
        draft=LOOKUP_DRAFT if name == "lookup" else "",
    )
    assembly = assemble(config)
    images = sample_images(assembly)

    def asked(of: object) -> list[list[int]]:
        return Run(of, real_requests(of, images)).tokens

    plain = asked(assembly)
    weights = _sums()
    if name == "plain 64":
        changed = assemble(msgspec.structs.replace(config, max_running=64))
    else:
        changed = with_settings(assembly, speculation=setting)
    drafted = asked(changed)
    again = asked(with_settings(assembly, speculation=SPECULATION_OFF))
    same = asked(assembly)
    written = [key for key, total in _sums().items() if weights.get(key, total) != total]
    counts = [_differ(plain, other) for other in (drafted, same, again)]
    return (
        f"{name:24} {counts[0]:3} of {len(plain)} differ; after it {counts[1]} by the same runner, "
        f"{counts[2]} by a new one; weights written: {', '.join(written) or 'none'}"
    )


def _sums() -> dict[str, int]:
    """A checksum of every parameter and table of the modules that are loaded."""
    sums = {}
    for each in gc.get_objects():
        if not isinstance(each, torch.nn.Module):
            continue
        for name, tensor in (*each.named_parameters(), *each.named_buffers()):
            key = f"{type(each).__name__}.{name}@{tensor.data_ptr():x}"
            if key not in sums and tensor.numel() and tensor.is_contiguous():
                sums[key] = int(tensor.data.view(torch.uint8).long().sum())
    return sums


def _differ(ours: Sequence[object], theirs: Sequence[object]) -> int:
    return sum(one != other for one, other in zip(ours, theirs, strict=True))


def main(argv: Sequence[str]) -> None:
    """Run all variants, or those that `--only` names, and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--at-once", default=7, type=int, help="processes")
    parser.add_argument("--device", default="cuda", help="cpu tries this program itself")
    parser.add_argument("--streams", default=STREAMS, type=int)
    parser.add_argument("--setting", default=SETTING, help="of speculation")
    parser.add_argument("--child", action="store_true", help="run the one variant here")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(VARIANTS)
    if arguments.child:
        line = run(names[0], arguments.device, arguments.streams, arguments.setting)
        sys.stdout.write(line + "\n")
        return

    def child(name: str) -> str:
        command = [sys.executable, "-m", "tests.gpu.wrong_steps", "--child", "--only", name]
        command += ["--device", arguments.device, "--setting", arguments.setting]
        command += ["--streams", str(arguments.streams)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            return f"{name:24} took too long"
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        return last[0] if done.returncode == 0 else f"{name:24} failed: {last}"

    with ThreadPoolExecutor(arguments.at_once) as pool:
        for line in pool.map(child, names):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
