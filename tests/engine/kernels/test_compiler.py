"""Kernels are compiled once per machine, and what `legato info` says of those of a machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from legato_engine.device.host import GpuDevice
from legato_engine.errors import InternalError
from legato_engine.kernels import machine
from legato_engine.kernels.cache import cache_folder
from legato_engine.kernels.cuda import capability, module
from legato_engine.kernels.cuda.capability import Kernels

TEXTS = {
    "good.cu": """#include "part.cuh"
        extern "C" __global__ void good(int* out) { *out = PART + N; }""",
    "broken.cu": 'extern "C" __global__ void broken() { no_such_name(); }',
    "part.cuh": "constexpr int PART = 1;",
}
MARK = b"from the cache"


def has_nvrtc():
    """Whether the compiler's bindings and its library are there."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


NVRTC = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and sources of the tests' own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(folder))
    monkeypatch.setattr(module, "sources", lambda: TEXTS)
    return folder


def code(**defines):
    """Machine code of the good source."""
    return module.compile_source("good.cu", {"N": 2} | defines, "sm_90")


def mark(cache):
    """Put a mark in place of everything cached."""
    for file in cache.iterdir():
        file.write_bytes(MARK)


@NVRTC
def test_what_is_cached_is_not_compiled_again(cache):
    """The same source with the same constants comes from the cache, which holds one whole file."""
    compiled = code()
    assert compiled.startswith(b"\x7fELF")
    assert [file.read_bytes() for file in cache.iterdir()] == [compiled]
    mark(cache)
    assert code() == MARK


@NVRTC
def test_a_changed_constant_is_compiled(cache):
    """Code made with other constants, or for another GPU, is not taken from the cache."""
    code()
    mark(cache)
    assert code(N=3) != MARK
    assert module.compile_source("good.cu", {"N": 2}, "sm_100") != MARK
    assert code() == MARK


@NVRTC
def test_code_of_a_virtual_architecture_is_ptx(cache):
    """Which the driver compiles; it comes from the cache as machine code does."""
    text = module.compile_source("good.cu", {"N": 2}, "compute_80")
    assert b".target sm_80" in text
    mark(cache)
    assert module.compile_source("good.cu", {"N": 2}, "compute_80") == MARK


@NVRTC
@pytest.mark.parametrize(
    ("arch", "macros", "lacking"),
    [
        ("sm_80", {"HAS_BULK_COPIES": 0, "HAS_E4M3": 0, "HAS_OVERLAP": 0}, 5),
        ("sm_89", {"HAS_BULK_COPIES": 0, "HAS_E4M3": 1, "HAS_OVERLAP": 0}, 4),
        ("sm_90a", {"HAS_BULK_COPIES": 1, "HAS_E4M3": 1, "HAS_OVERLAP": 1}, 0),
        ("sm_120", {"HAS_BULK_COPIES": 1, "HAS_E4M3": 1, "HAS_OVERLAP": 1}, 3),
        ("compute_75", {"HAS_BULK_COPIES": 0, "HAS_E4M3": 0, "HAS_OVERLAP": 0}, 7),
    ],
)
def test_the_table_says_what_an_architecture_has(arch, macros, lacking):
    """Sources learn it by macros, people by the groups of kernels that do not run and why."""
    gpu = capability.gpu_of_arch(arch)
    assert capability.macros(arch) == macros
    reasons = [reason for kernels in capability.Kernels if (reason := gpu.lacks(kernels))]
    assert len(reasons) == lacking
    assert all(gpu.name in reason for reason in reasons)


@NVRTC
@pytest.mark.parametrize("file", ["good.cu", "part.cuh"])
def test_a_changed_source_is_compiled(cache, monkeypatch, file):
    """A change of the source, or of a header that it may include, invalidates the cache."""
    code()
    mark(cache)
    monkeypatch.setattr(module, "sources", lambda: TEXTS | {file: TEXTS[file] + "\n// more"})
    assert code() != MARK


@NVRTC
def test_a_source_of_the_caller_is_compiled_with_the_kernels_headers(cache, tmp_path):
    """It comes from the cache until its text changes."""
    source = tmp_path / "own.cu"

    def own():
        return module.compile_source("own.cu", {"N": 2}, "sm_90", folder=tmp_path)

    source.write_text(TEXTS["good.cu"])
    assert own().startswith(b"\x7fELF")
    mark(cache)
    assert own() == MARK
    source.write_text(TEXTS["good.cu"] + "\n// more")
    assert own() != MARK


@NVRTC
def test_a_broken_source_says_what_is_wrong(cache):
    """The error has the compiler's message, and nothing is cached."""
    with pytest.raises(InternalError, match=r"broken\.cu does not compile: (.|\n)*no_such_name"):
        module.compile_source("broken.cu", {}, "sm_90")
    assert not cache.exists()


@NVRTC
def test_a_cache_that_cannot_be_written_is_no_failure(cache, monkeypatch):
    """Where no folder can be made, code is compiled each time."""
    cache.write_text("a file where the folder would be")
    assert code() == code()
    assert code().startswith(b"\x7fELF")
    assert cache.is_file()


@NVRTC
def test_the_cache_is_where_it_is_said_to_be(tmp_path, monkeypatch):
    """The engine's own variable wins over the user's cache folder, which wins over the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LEGATO_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "legato" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "legato" / "kernels"
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@NVRTC
def test_several_that_were_compiled_ahead_are_not_compiled_again(cache, monkeypatch):
    """Nor where the cache cannot be written."""
    cache.write_text("a file, not a folder")
    module.compile_ahead("good.cu", [{"N": n} for n in (3, 4, 5)], "sm_90")

    def compiled_again(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(module, "_compile", compiled_again)
    codes = {module.compile_source("good.cu", {"N": n}, "sm_90") for n in (5, 3, 4)}
    assert len(codes) == 3


@NVRTC
def test_a_source_that_does_not_compile_ahead_says_so(cache):
    """As it would alone."""
    with pytest.raises(InternalError, match="no_such_name"):
        module.compile_ahead("broken.cu", [{"N": 1}, {"N": 2}], "sm_90")


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((9, 0), set()), ((8, 6), {"grouped products of experts"})],
)
def test_a_machine_is_described_by_the_table(capability, missing):
    """Each group of kernels that a GPU does not get has the reason."""
    kernels = machine.gpu_kernels(GpuDevice("cuda:0", "a GPU", capability, 1))
    assert {each.title for each in Kernels} == set(kernels)
    told = {name for name, why in kernels.items() if why}
    assert missing <= told
    assert bool(told) == bool(missing)
    assert all(f"compute capability {capability[0]}.{capability[1]}" in kernels[n] for n in told)


def test_a_machine_is_described_without_torch():
    """Importing it would take seconds."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from legato_engine.kernels import machine\n"
        "assert machine.report()['cpu']['cores'] >= 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
