"""Nothing that comes from outside can name code to run: no pickle and no eval in the library and in the server.

The list of what is read from outside, and how, is in docs/security.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "np.load", "numpy.load", "np.loadtxt", "os.system", "os.popen", "tempfile.mktemp"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "jinja2.Environment"),
}
_OBJECT_COLLECTIVES = ("_object", "_object_list", "_objects")


def unsafe(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in _MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                named = {f"{module}.{name.name}" for name in names}
                yield from sorted(named & _CALLS)
                yield from (name for name in named if module.partition(".")[0] in _MODULES)
                if module.startswith("torch.distributed"):
                    yield from (name for name in named if name.endswith(_OBJECT_COLLECTIVES))
            case ast.Call(func=func, keywords=keywords):
                name = ast.unparse(func)
                if name in _CALLS or ("dist" in name and name.endswith(_OBJECT_COLLECTIVES)):
                    yield name
                yield from (f"{word.arg}=..." for word in keywords if word.arg in ("shell", "allow_pickle"))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval('1')",
        "torch.load(path)",
        "yaml.load(text)",
        "from yaml import unsafe_load",
        "dist.all_gather_object(found, mine)",
        "subprocess.run(command, shell=True)",
        "np.load(path)",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(unsafe(source))


@pytest.mark.parametrize("folder", ["raycache", "launch", "actors"])
def test_nothing_that_runs_what_it_reads_is_used(folder: str) -> None:
    files = sorted((_ROOT / folder).rglob("*.py"))
    assert len(files) > 5
    found = {str(file): list(unsafe(file.read_text(encoding="utf-8"))) for file in files}
    assert {file: names for file, names in found.items() if names} == {}
