"""The library is compiled once, by any number of processes, and a machine that cannot says why."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from legato_engine.kernels.cache import cache_folder
from legato_engine.kernels.cpu import compiler
from legato_engine.kernels.cpu import library as native
from legato_engine.kernels.cpu.compiler import CannotCompileError, library_path

from tests.arm64 import CROSS, EMULATOR, on_arm64

COMPILER = """#!/bin/sh
test "$1" = --version && echo 1 && exit
echo "$@" > "$LOG.options"
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo compiled >> "$LOG"
echo library > "$2"
"""
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {f"avx512{name}" for name in ("f", "bw", "cd", "dq", "vl", "_vnni", "_bf16")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path


def run_on(monkeypatch, machine, flags=frozenset(AVX2)):
    """Be a machine of an architecture, whose processor has `flags`."""
    processor = compiler._Processor("made up", frozenset(flags))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(compiler, "_processor", lambda: processor)


def fake(folder, monkeypatch, text=COMPILER):
    program = folder / "fake-c++"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))


def test_a_library_is_compiled_once(folder, monkeypatch):
    """The second call finds the first one's file, until the sources are others."""
    fake(folder, monkeypatch)
    path = library_path()
    assert path.read_text() == "library\n"
    assert library_path() == path
    assert (folder / "log").read_text() == "compiled\n"
    monkeypatch.setattr(compiler, "sources", lambda: {"decoder.cpp": "// other"})
    assert library_path() != path


def test_processes_that_compile_at_once_find_one_whole_file(folder, monkeypatch):
    """Both get the same path, and nothing but that file is in the cache."""
    fake(folder, monkeypatch)
    code = (
        "from legato_engine.kernels.cpu.compiler import library_path as p; print(p().read_text())"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in both] == ["library\n\n"] * 2
    assert len(list((folder / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "there is no C++ compiler"),
        (
            "#!/bin/sh\ntest $1 = --version && exit\necho 'x.h:1: error: odd' >&2; exit 1",
            "error: odd",
        ),
    ],
)
def test_a_machine_without_a_working_compiler_says_why(folder, monkeypatch, program, reason):
    """The reason names what is missing or the compiler's own error, and is logged once."""
    if program is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(folder))
    else:
        fake(folder, monkeypatch, program)
    with pytest.raises(CannotCompileError, match=reason.replace("+", r"\+")):
        library_path()
    logged = []
    monkeypatch.setattr(native._log, "warning", lambda *event, **fields: logged.append(fields))
    native._library.cache_clear()
    try:
        assert native.library("auto") is None
        assert native.library("auto") is None
    finally:
        native._library.cache_clear()
    (fields,) = logged
    assert reason in fields["reason"]


@pytest.mark.parametrize(
    ("machine", "own", "others"),
    [
        ("x86_64", "-march=native", "-mcpu=native"),
        ("aarch64", "-mcpu=native", "-march=native"),
        ("arm64", "-mcpu=native", "-march=native"),
    ],
)
def test_a_library_is_for_the_machines_own_processor(folder, monkeypatch, machine, own, others):
    """By the option that compilers of the architecture have for that, under Linux and macOS."""
    run_on(monkeypatch, machine)
    fake(folder, monkeypatch)
    assert library_path().read_text() == "library\n"
    options = (folder / "log.options").read_text().split()
    assert own in options
    assert others not in options


@pytest.mark.parametrize(
    ("machine", "flags", "file", "option"),
    [
        ("x86_64", AVX2, "any-avx2.so", "-march=x86-64-v3"),
        ("x86_64", AVX512 - {"avx512_bf16"}, "any-avx2.so", "-march=x86-64-v3"),
        ("x86_64", AVX512, "any-avx512.so", "-mavx512bf16"),
        ("aarch64", {"asimd"}, "any-neon.so", "-march=armv8-a"),
        ("aarch64", {"asimd", "asimddp"}, "any-dotprod.so", "-march=armv8.2-a+dotprod"),
    ],
)
def test_a_library_beside_the_sources_serves_a_machine_without_a_compiler(
    folder, monkeypatch, machine, flags, file, option
):
    """The best that the processor can run; where there is a compiler, its own is used."""
    run_on(monkeypatch, machine, flags)
    (folder / "decoder.cpp").write_text("// main")
    monkeypatch.setattr(compiler, "_folder", lambda: folder)
    monkeypatch.setattr(compiler, "sources", lambda: {"decoder.cpp": "// main"})
    fake(folder, monkeypatch, COMPILER + 'cat "$LOG.options" > "$2"\n')
    compiler.build_for_any()
    built = folder / file
    assert option in built.read_text().split()
    assert library_path() != built
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(folder / "nothing"))
    assert library_path() == built


def test_another_processor_has_no_library(monkeypatch):
    """On x86 the kernels need AVX2, FMA and F16C, and other architectures than arm64 have none."""
    run_on(monkeypatch, "x86_64", {"fma"})
    with pytest.raises(CannotCompileError, match="the processor lacks avx2, f16c"):
        library_path()
    run_on(monkeypatch, "riscv64")
    with pytest.raises(CannotCompileError, match="there are none for riscv64"):
        library_path()


def test_a_start_names_the_instructions_of_its_layers(library, monkeypatch):
    """Once, however many models load."""
    logged = []
    monkeypatch.setattr(native._log, "info", lambda *event, **fields: logged.append(fields))
    native._library.cache_clear()
    for _ in range(2):
        found = native.library("auto")
        assert found is not None
        assert found.instructions == library.instructions
    assert logged == [{"instructions": library.instructions}]
    assert library.instructions.split()[0] in ("AVX2", "AVX-512", "NEON")


def test_torch_is_a_choice():
    """Nothing is compiled for it."""
    assert native.library("torch") is None


PROGRAM = Path(__file__).parent / "bits.cpp"
INCLUDES = f"-I{Path(compiler.__file__).parent / 'sources'}"


def compiled(compile_with, *options):
    """Compile once per machine, like the libraries."""
    flags = tuple(each for each in compiler._FLAGS if each not in ("-fPIC", "-shared"))
    options = *flags, *options, "-static"
    key = compiler._key(compile_with, options, compiler.sources() | {"": PROGRAM.read_text()})
    path = cache_folder() / f"bits-{key}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        subprocess.run([compile_with, *options, INCLUDES, "-o", part, PROGRAM], check=True)
        part.replace(path)
    return path


def printed(command):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stderr.strip(), done.stdout.splitlines()


@pytest.fixture(scope="module")
def x86():
    instructions, lines = printed([compiled("g++", "-march=x86-64-v3")])
    assert instructions == "AVX2"
    assert len(lines) > 100
    return lines


@on_arm64
@pytest.mark.parametrize(
    ("option", "cpu", "instructions"),
    [
        ("-march=armv8-a", "cortex-a72", "NEON"),
        ("-march=armv8.2-a+dotprod", "neoverse-n1", "NEON with dotprod"),
        ("-march=armv8.2-a+dotprod+i8mm", "max", "NEON with dotprod and i8mm"),
    ],
)
def test_results_have_the_bits_of_x86(x86, option, cpu, instructions):
    """Products and layers of all kinds of weights, in any chunks and on any number of threads."""
    program = compiled(CROSS, *compiler._ARM64.options, option)
    found, lines = printed([EMULATOR, "-cpu", cpu, program])
    assert found == instructions
    assert lines == x86


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86")
def test_chunks_do_not_change_bits(x86):
    """Each kind of layers gives one hash for a prompt in chunks of any size."""
    hashes: dict[str, list[str]] = {}
    for line in x86:
        if ", chunks of " in line:
            name, rest = line.split(", chunks of ")
            hashes.setdefault(name, []).append(rest.split()[1])
    assert len(hashes) == 5
    assert all(len(found) == 4 and len(set(found)) == 1 for found in hashes.values())
