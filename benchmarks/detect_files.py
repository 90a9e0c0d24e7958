"""Count the source files that one Detect enters in all processes: `benchmarks detect_files`.

A profile hook in every process of a server and of its client notes each file of the product whose
functions run between two writes to a shared flag. A first Detect warms caches and is not counted.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.record import ROOT

PACKAGES = ("clients/python/legato_client", "engine/legato_engine", "service/legato_service")
IMAGE = ROOT / "engine/tiny/legato_tiny/samples/street.jpg"
TIMEOUT = 300  # seconds until the server is ready
_FOLDER = "LEGATO_DETECT_FILES"

_HOOK = f"""
import mmap, os, sys, threading
folder = os.environ["{_FOLDER}"]
with open(os.path.join(folder, "flag"), "r+b") as file:
    flag = mmap.mmap(file.fileno(), 1)
seen = set()

def note(frame, event, _):
    if event == "call" and flag[0] == 1:
        name = frame.f_code.co_filename
        if name not in seen:
            seen.add(name)
            with open(os.path.join(folder, str(os.getpid())), "a") as out:
                out.write(name + "\\n")

threading.setprofile(note)
sys.setprofile(note)
"""

_CLIENT = """
import mmap, os, sys, time
from legato_client import Client; from legato_client import LegatoError

def ask(path, patience):
    while True:
        try:
            return client.detect(path, "bus").objects
        except LegatoError:
            if patience == 0:
                raise
            patience -= 1
            time.sleep(1)

with open(os.path.join(os.environ["%s"], "flag"), "r+b") as file, Client(sys.argv[1]) as client:
    flag = mmap.mmap(file.fileno(), 1)
    ask(sys.argv[2], patience=%d)
    flag[0] = 1
    assert ask(sys.argv[3], patience=0)
    flag[0] = 0
"""


def entered(address: str, first: pathlib.Path, second: pathlib.Path) -> dict[str, set[str]]:
    """Return the files that a Detect of `second` enters, by package, after one of `first`."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "flag").write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(_HOOK)
        environment = os.environ | {
            _FOLDER: name,
            "PYTHONPATH": os.pathsep.join((name, os.environ.get("PYTHONPATH", ""))),
        }
        command = [sys.executable, "-m", "legato_service", "--listen", address]
        server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            client = [sys.executable, "-c", _CLIENT % (_FOLDER, TIMEOUT)]
            subprocess.run([*client, address, first, second], env=environment, check=True)
        finally:
            server.terminate()
            server.wait()
        lines = [
            line
            for file in folder.iterdir()
            if file.name.isdigit()
            for line in file.read_text().splitlines()
        ]
    return {
        package: {line for line in lines if line.startswith(str(ROOT / package))}
        for package in PACKAGES
    }


def main(argv: Sequence[str]) -> int:
    """Print the number of files by package, and with `--list` their names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks detect_files", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files")
    arguments = parser.parse_args(argv)
    others = sorted(IMAGE.parent.glob("*.jpg"))
    first = next(other for other in others if other != IMAGE)
    found = entered("127.0.0.1:50959", first, IMAGE)
    for package, files in found.items():
        print(f"{package.rsplit('/', 1)[1]}: {len(files)}")
        for file in sorted(files) if arguments.list else ():
            print(f"  {pathlib.Path(file).relative_to(ROOT)}")
    print(f"all: {sum(map(len, found.values()))}")
    return 0
