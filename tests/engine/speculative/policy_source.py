"""The kernels' block policies, `block_policy.cuh`, compiled for the host."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
from legato_engine.kernels.cuda.drafting import RuleConstants
from legato_engine.kernels.cuda.module import sources
from legato_engine.runtime.descriptors import (
    DESCRIPTOR,
    KV_PRESSURE,
    STARTS,
    UNDER_PRESSURE,
    VERIFIED,
)

COMPILER = shutil.which("g++")
_OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++")
_PREAMBLE = """
#include <cstddef>
#define __device__
#define __forceinline__ inline
#define SYNC()
static double __ddiv_rn(double a, double b) { return a / b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
"""
_ENTRIES = """
extern "C" void allot_all(RequestDescriptor* requests, const Rule* rule, const Counts* overall,
                          const double* seconds, const Candidate* candidates, int count,
                          int pressed) {
  static Auction all;
  allot(requests, *rule, *overall, seconds, candidates, count, pressed, &all, 0, 1);
}
extern "C" void update_one(RequestDescriptor* request, const Rule* rule, Counts* overall,
                           int accepted, int proposed) {
  update(*request, *rule, accepted, proposed);
  count(*overall, *rule, accepted, proposed);
}
extern "C" void offsets(long* at) {
  at[0] = offsetof(RequestDescriptor, accepted_weight);
  at[1] = offsetof(RequestDescriptor, tried_weight);
  at[2] = offsetof(RequestDescriptor, ema_acceptance_rate);
  at[3] = offsetof(RequestDescriptor, current_block_size);
  at[4] = offsetof(RequestDescriptor, idle_steps), at[5] = offsetof(RequestDescriptor, flags);
  at[6] = sizeof(RequestDescriptor), at[7] = sizeof(Rule) / sizeof(double);
  at[8] = KV_PRESSURE, at[9] = STARTS, at[10] = VERIFIED;
}
"""


class PolicySource:
    """One policy's functions over descriptors in numpy arrays; `fault` replaces some source."""

    def __init__(self, policy, num_rows, folder, fault=("", "")):
        rule = RuleConstants.of(policy)
        defines = {**rule.defines, "ROWS": num_rows}
        self._library = _compiled(tuple(sorted(defines.items())), Path(folder), fault)
        self._rule = np.array(rule.values, np.float64)
        self.requests = np.zeros(num_rows, DESCRIPTOR)
        self.overall = np.zeros(2, np.float64)
        self.seconds = np.ones(num_rows * (1 + policy.max_block) + 1, np.float64)

    def allot(self, candidates, *, under_pressure):
        """Choose the blocks of (row, most) candidates."""
        array = np.array(candidates, np.int32).reshape(-1, 2)
        self._library.allot_all(
            *map(_pointer, (self.requests, self._rule, self.overall, self.seconds, array)),
            len(candidates),
            int(under_pressure),
        )

    def update(self, row, accepted, proposed):
        """Learn of one verification."""
        one = self.requests[row : row + 1]
        self._library.update_one(
            *map(_pointer, (one, self._rule, self.overall)), accepted, proposed
        )

    def layout(self):
        """Return offsets and sizes as the compiler has them."""
        at = np.zeros(11, np.int64)
        self._library.offsets(_pointer(at))
        return at.tolist()


def expected_layout(policy):
    """The same as the host has them."""
    assert DESCRIPTOR.fields is not None
    offsets = [offset for _, offset, *_ in DESCRIPTOR.fields.values()]
    flags = [KV_PRESSURE, STARTS, VERIFIED]
    assert UNDER_PRESSURE == 1
    return [*offsets, DESCRIPTOR.itemsize, len(RuleConstants.of(policy).values), *flags]


@functools.cache
def _compiled(defines, folder, fault):
    source = sources()["block_policy.cuh"].replace("#pragma once", "")
    right, wrong = fault
    assert right in source, f"{right} is not in the source"
    source = source.replace(right, wrong) if right else source
    name = "_".join([*(str(value) for _, value in defines), str(abs(hash(fault)))])
    file, library = folder / f"{name}.cc", folder / f"{name}.so"
    file.write_text(_PREAMBLE + source + _ENTRIES)
    options = [f"-D{key}={value}" for key, value in defines]
    assert COMPILER is not None
    subprocess.run([COMPILER, *_OPTIONS, *options, str(file), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)
