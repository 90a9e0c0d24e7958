"""The kernels of arm64, in an emulator."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from legato_engine.kernels.cpu import compiler

from tests.arm64 import CROSS, EMULATOR, MARKS

PROGRAM = Path(__file__).parent / "bits.cpp"
INCLUDES = f"-I{Path(compiler.__file__).parent / 'sources'}"

pytestmark = MARKS


def compiled(compile_with, folder, *options):
    program = folder / "bits"
    flags = [each for each in compiler._FLAGS if each not in ("-fPIC", "-shared")]
    command = [compile_with, *flags, *options, "-static", INCLUDES, "-o", program, PROGRAM]
    subprocess.run(command, check=True)
    return program


def printed(command):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stderr.strip(), done.stdout.splitlines()


@pytest.fixture(scope="module")
def x86(tmp_path_factory):
    program = compiled("g++", tmp_path_factory.mktemp("x86"), "-march=x86-64-v3")
    instructions, lines = printed([program])
    assert instructions == "AVX2"
    assert len(lines) > 100
    return lines


@pytest.mark.parametrize(
    ("option", "cpu", "instructions"),
    [
        ("-march=armv8-a", "cortex-a72", "NEON"),
        ("-march=armv8.2-a+dotprod", "neoverse-n1", "NEON with dotprod"),
        ("-march=armv8.2-a+dotprod+i8mm", "max", "NEON with dotprod and i8mm"),
    ],
)
def test_results_have_the_bits_of_x86(tmp_path, x86, option, cpu, instructions):
    """Products and layers of all kinds of weights, in any chunks and on any number of threads."""
    program = compiled(CROSS, tmp_path, *compiler._ARM64.options, option)
    found, lines = printed([EMULATOR, "-cpu", cpu, program])
    assert found == instructions
    assert lines == x86


def test_chunks_do_not_change_bits(x86):
    """Each kind of layers gives one hash for a prompt in chunks of any size."""
    hashes: dict[str, list[str]] = {}
    for line in x86:
        if ", chunks of " in line:
            name, rest = line.split(", chunks of ")
            hashes.setdefault(name, []).append(rest.split()[1])
    assert len(hashes) == 5
    assert all(len(found) == 4 and len(set(found)) == 1 for found in hashes.values())
