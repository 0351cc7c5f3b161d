"""The command's door: `raycache` and `python -m raycache`.

`actors` and `launch` are plain top-level names, so a folder or another package on the path can shadow them. That is
told here, before the foreign module runs.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Run the command line; returns the exit code."""
    home = Path(__file__).resolve().parent.parent
    for name in ("actors", "launch"):
        found = _location(find_spec(name))
        if found != home / name:
            print(_shadowed(name, found=found, wanted=home / name), file=sys.stderr)
            return 2

    from launch.cli.main import main as run

    return run()


def _location(spec: ModuleSpec | None) -> Path | None:
    """Folder of a package, or file of a plain module."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin or "?").resolve()


def _shadowed(name: str, *, found: Path | None, wanted: Path) -> str:
    if found is None:
        return f"raycache: error: package {name!r} is missing, it should be {wanted}; install raycache again"
    return (
        f"raycache: error: {found} shadows raycache's own package {name!r}, {wanted}; "
        "remove or rename it, or run from another folder and without it in PYTHONPATH"
    )


if __name__ == "__main__":
    sys.exit(main())
