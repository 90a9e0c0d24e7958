"""On a GPU: a warm loop neither synchronises nor allocates, whatever rows carry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from cuda.bindings import driver, runtime
from legato_engine.config import LOOP_PATHS, RESIDENT_PATH, EngineConfig
from legato_engine.core.assembly import Assembly, assemble, with_decode_path, with_speculation
from legato_engine.models.moondream.presets import moondream2_config
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.types import RequestKey

from tests.adapters import random_adapter, safetensors_file
from tests.engine.models import hub_folder
from tests.gpu.guard import (
    GRAPHS,
    KERNELS,
    RANKS,
    ROWS,
    Decodes,
    GuardViolation,
    close,
    decoding,
    guarded,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_guard_notices() -> None:
    """Synchronisation and allocation by torch, driver and runtime are noticed.

    So is a copy that waits because its memory is pageable; a copy to page-locked memory passes.
    """
    on_device, stream = torch.ones(4, device="cuda"), torch.cuda.current_stream().cuda_stream
    pageable, pinned = torch.ones(4), torch.ones(4, pin_memory=True)
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def copied_to(host: torch.Tensor) -> None:
        runtime.cudaMemcpyAsync(host.data_ptr(), on_device.data_ptr(), 16, kind, stream)

    def synchronised() -> None:
        runtime.cudaDeviceSynchronize()

    def mapped() -> None:
        kept.append(driver.cuMemAlloc(1 << 24)[1])

    kept: list[object] = []
    for offence in (
        lambda: on_device.sum().item(),
        lambda: torch.ones(4, device="cuda"),
        lambda: driver.cuStreamSynchronize(stream),
        synchronised,
        mapped,
        lambda: copied_to(pageable),
    ):
        with pytest.raises((RuntimeError, GuardViolation)), guarded():
            offence()
    allocate = driver.cuMemAlloc
    with pytest.raises(GuardViolation, match="bytes of device memory"), guarded():
        kept.append(allocate(1 << 26)[1])  # as a library would, behind the bindings
    with guarded():
        copied_to(pinned)
    torch.cuda.synchronize()
    assert pinned.tolist() == [1.0] * 4
    for address in kept:
        driver.cuMemFree(address)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembly]:
    """Moondream 2's shape with random weights and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        data = safetensors_file(random_adapter(moondream2_config().text, rank, seed))
        (folder / f"{name}.safetensors").write_bytes(data)
    config = EngineConfig(
        model="moondream2",
        random_weights=True,
        device="cuda",
        max_running=ROWS,
        adapters=str(folder),
        kv_memory_fraction=0.2,
        decode_path="graph",
    )
    assembly = assemble(config)
    yield assembly
    close(assembly)


@pytest.mark.parametrize("adapters", [(), ("x", "y")])
@pytest.mark.parametrize(
    "setting",
    [
        *("graph", "loop", "resident", "fixed:3", "seed", "budget"),
        *("loop fixed:3", "loop budget", "resident fixed:3"),
    ],
)
def test_a_warm_decode_loop_is_quiet(
    large: Assembly, setting: str, adapters: tuple[str, ...]
) -> None:
    """Plain, looping, megakernel and drafting decodes neither allocate nor synchronise.

    With rows of adapters, which the kernel leaves to loops, and without.
    """
    assembly, num_steps, num_launches = large, 40, 40
    path, _, drafts = setting.partition(" ")
    if path in LOOP_PATHS:  # of up to 256 steps; behind it is a single one
        assembly = with_speculation(large, drafts) if drafts else large
        assembly = with_decode_path(assembly, path)
        num_steps, num_launches = (60, 0) if drafts else (300, 2)
    elif setting != "graph":
        assembly = with_speculation(large, setting)
    seen = Decodes()
    scheduler = decoding(assembly, seen, length=600, adapters=adapters)
    before = len(seen.kinds)
    with guarded(GRAPHS, KERNELS) if path == RESIDENT_PATH else guarded():
        for _ in range(num_steps):
            scheduler.step()
    launches = seen.kinds[before:]
    assert launches == [LaunchKind.DECODE] * max(num_launches, len(launches))
    assert len(launches) < num_steps or path not in LOOP_PATHS
    assert scheduler.load().running == ROWS
    for index in range(ROWS):
        scheduler.abort(RequestKey(str(index)))
    scheduler.drain()


@pytest.mark.parametrize("setting", ["graph", "loop", "seed", "loop seed"])
def test_the_draft_layer_and_text_models_are_quiet(setting: str, tmp_path: Path) -> None:
    """Legato-tiny with its own draft, whose proposals depend on the block, and a Phi by torch."""
    hub_folder.write(tmp_path, hub_folder.phi())
    for model, weights in (("legato-tiny", ""), ("phi", str(tmp_path))):
        config = EngineConfig(
            model=model, weights=weights, device="cuda", max_running=ROWS, num_pages=1024
        )
        path = "loop" if setting.startswith("loop") else "graph"
        drafts = "seed" if setting.endswith("seed") else "off"
        changed = msgspec.structs.replace(config, decode_path=path, speculation=drafts)
        assembly = assemble(changed)
        num_steps, num_launches = (210, 1) if setting == "loop" else (8, 8)
        if setting == "loop seed":  # in the midst of a loop
            num_launches = 0
        seen = Decodes()
        scheduler = decoding(assembly, seen, length=200)
        with guarded():
            for _ in range(num_steps):
                scheduler.step()
        if num_launches:
            assert seen.kinds[-num_launches:] == [LaunchKind.DECODE] * num_launches
        close(assembly)
