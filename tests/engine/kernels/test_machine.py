"""What `legato info` says of this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
from legato_engine.device.host import GpuDevice
from legato_engine.kernels import machine
from legato_engine.kernels.cuda.capability import Kernels


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
