"""The programs that run the list: how to build them, and what they need."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GO = ROOT / "clients" / "go"
CPP = ROOT / "clients" / "cpp"
CPP_BUILD = ROOT / "build" / "cpp"
NODE = ROOT / "tests" / "interop" / "node"
PATH = os.pathsep.join((str(ROOT / ".tools" / "bin"), os.environ["PATH"]))
ENVIRONMENT = {
    **os.environ,
    "PATH": PATH,
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}
NAMES = ("python", "go", "node", "grpcurl", "cpp")
PATIENCE = 500  # seconds for a download or a build, of which a fresh machine has much to do
GO_TEST = ("go", "test", "-vet=off", "-json", "-count=1")
"""A command whose output is events; all checks of `go vet` have a test of their own."""


class Missing(Exception):
    """Raised when a program cannot run here; the text says what it needs."""


def command(name: str, folder: Path) -> list[str]:
    """Return the command of a program, built in `folder` if necessary; raises Missing."""
    if name == "python":
        return [sys.executable, "-m", "tests.conformance.run_python"]
    if name == "grpcurl":
        if shutil.which("grpcurl", path=PATH) is None:
            raise Missing("needs grpcurl: `make tools` installs it where go is installed")
        return [sys.executable, "-m", "tests.conformance.run_grpcurl"]
    if name == "node":
        install_node_packages()
        return ["node", str(NODE / "conformance.js")]
    if name == "cpp":
        build_cpp("conformance")
        return [str(CPP_BUILD / "conformance")]
    fetch_go_modules()
    run("go", "build", "-o", str(folder / "conformance"), "./internal/conformance", cwd=GO)
    return [str(folder / "conformance")]


def fetch_go_modules() -> None:
    """Download the dependencies of `clients/go`; raises Missing without go or network."""
    if shutil.which("go") is None:
        raise Missing("needs go")
    fetch("go", "mod", "download", cwd=GO)


def build_cpp(target: str) -> None:
    """Build a target of `clients/cpp` in build/cpp; raises Missing without CMake or gRPC C++."""
    needs = "needs cmake, a C++ compiler and gRPC C++: docs/quickstart-cpp.md names the packages"
    if any(shutil.which(each) is None for each in ("cmake", "c++", "protoc")):
        raise Missing(needs)
    CPP_BUILD.mkdir(parents=True, exist_ok=True)
    with (CPP_BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            run("cmake", "-S", str(CPP), "-B", str(CPP_BUILD))
        except subprocess.CalledProcessError as error:
            if "gRPC" not in error.stderr and "Protobuf" not in error.stderr:
                raise
            raise Missing(f"{needs}: {error.stderr}") from error
        try:
            run("cmake", "--build", str(CPP_BUILD), "--parallel", "1", "--target", target)
        except subprocess.CalledProcessError as error:
            raise AssertionError(error.stdout + error.stderr) from error


def install_node_packages() -> None:
    """Install the packages of package-lock.json; raises Missing as above."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Missing("needs node and npm")
    installed, wanted = NODE / "node_modules/.package-lock.json", NODE / "package-lock.json"
    with wanted.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # npm removes what another process of the tests installs
        if installed.exists() and installed.stat().st_mtime >= wanted.stat().st_mtime:
            return
        fetch("npm", "ci", cwd=NODE)


def fetch(*words: str, cwd: Path) -> None:
    """Run a command that needs the network; raises Missing without it."""
    try:
        run(*words, cwd=cwd)
    except subprocess.TimeoutExpired as error:
        raise Missing(f"{words[0]} could not fetch what it needs in {PATIENCE} s") from error
    except subprocess.CalledProcessError as error:
        raise Missing(f"{words[0]} could not fetch what it needs: {error.stderr}") from error


def run(*words: str, cwd: Path = ROOT) -> str:
    """Return the output of a command that must succeed."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return done.stdout
