"""No code of the product runs what a file says, or fetches anything from the network."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PULL = ROOT / "engine/legato_engine/hub/download.py"

PRODUCT = ("engine/legato_engine", "engine/tiny", "service", "clients/python")

FORBIDDEN_MODULES = frozenset(
    {
        "aiohttp",
        "cloudpickle",
        "dill",
        "ftplib",
        "http.client",
        "httpx",
        "huggingface_hub",
        "joblib",
        "marshal",
        "requests",
        "shelve",
        "urllib.request",
        "urllib3",
        "yaml",
    }
)
FORBIDDEN_CALLS = frozenset(
    {
        "eval",
        "exec",
        "jinja2.Environment",
        "jinja2.Template",
        "os.popen",
        "os.system",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "runpy.run_path",
        "torch.hub.load",
        "torch.jit.load",
    }
)
UNSAFE_KEYWORDS = {"shell": True, "trust_remote_code": True, "allow_pickle": True}


def findings(source: str) -> Iterator[str]:
    """What is wrong in a module, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name in _imported(node):
                if name in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS:
                    yield f"{node.lineno}: imports {name}"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    return [node.module or "", *(f"{node.module}.{name}" for name in names)]


def _in_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {
        each.arg: each.value.value
        for each in node.keywords
        if each.arg and isinstance(each.value, ast.Constant)
    }
    if name in FORBIDDEN_CALLS:
        yield f"{node.lineno}: calls {name}"
    if name == "torch.load" and keywords.get("weights_only") is not True:
        yield f"{node.lineno}: calls torch.load without weights_only"
    for keyword, unsafe in UNSAFE_KEYWORDS.items():
        if keywords.get(keyword) is unsafe:
            yield f"{node.lineno}: passes {keyword}={unsafe}"


def test_only_pull_reaches_what_downloads():
    """No module of a server imports it, directly or over another one of the package."""
    modules = {path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    reach = {
        path.relative_to(ROOT)
        for path in modules
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        if {"legato_engine.hub.download"} & {*_imported(node)}
    }
    assert not reach, "its command is loaded by name"


@pytest.mark.parametrize("folder", PRODUCT)
def test_the_product_runs_and_fetches_nothing(folder):
    """Weights are tensors, settings are JSON, templates are sandboxed; nothing is downloaded.

    But by `legato pull`, whose one file of downloads no process of a server imports.
    """
    modules = sorted({*(ROOT / folder).rglob("*.py")} - {PULL})
    assert modules
    found = [
        f"{path.relative_to(ROOT)}:{finding}"
        for path in modules
        for finding in findings(path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import yaml",
        "from urllib import request",
        "import urllib.request",
        "from pickle import loads",
        "import pickle\npickle.load(file)",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "jinja2.Template(text)",
    ],
)
def test_each_rule_finds_what_it_forbids(source):
    """The control: the rules are not empty."""
    assert list(findings(source))


def test_what_is_safe_is_not_found():
    """The product's own way to read tensors, and to name pickle's error."""
    safe = "import pickle\ntorch.load(path, weights_only=True)\nexcept_ = pickle.UnpicklingError"
    assert not list(findings(safe))
