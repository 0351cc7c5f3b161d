"""A model directory with the headers of its weights, and none of the numbers, to check a model before it is fetched.

A safetensors file opens with its header, so a request for its first bytes says names, shapes and types. The file here
has those bytes and the size of the whole one, and takes no more of the disk than they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from raycache.checkpoint.hub_files import HubFile
from raycache.checkpoint.hub_id import HubId
from raycache.checkpoint.tensor_files import OUTLINE

_AT_A_TIME = 8
_FIRST_BYTES = 1 << 17
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ANSWER_S = 20.0


def outline(
    model: HubId, source: Path, missing: Sequence[HubFile], *, folder: Path, endpoint: str, token: str | bool | None
) -> None:
    """Make the directory.

    Args:
        model: pinned.
        source: its directory, without the missing files.
        missing: its safetensors files that are not there.
        folder: to make.
        endpoint, token: of the Hub.
    Raises:
        see `hub_errors.FAILURES`.
    """
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    (folder / OUTLINE).touch()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(partial(_outline_file, model, folder=folder, endpoint=endpoint, token=token), missing))


def _outline_file(model: HubId, file: HubFile, *, folder: Path, endpoint: str, token: str | bool | None) -> None:
    url = hf_hub_url(model.repo, file.name, revision=model.revision, endpoint=endpoint)
    headers = build_hf_headers(token=token, library_name="raycache")
    head = _first_bytes(url, headers, count=_FIRST_BYTES)
    length = min(int.from_bytes(head[:_LENGTH_BYTES], "little"), _MAX_HEADER_BYTES) + _LENGTH_BYTES
    if length > len(head):
        head = _first_bytes(url, headers, count=length)
    path = folder / file.name
    path.unlink(missing_ok=True)  # one of another size
    with path.open("wb") as made:
        made.write(head[:length])
        made.truncate(file.size)


def _first_bytes(url: str, headers: dict[str, str], *, count: int) -> bytes:
    wanted = {**headers, "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=wanted, timeout=_ANSWER_S) as answer:
        hf_raise_for_status(answer)
        found = b""
        for chunk in answer.iter_bytes():
            found += chunk
            if len(found) >= count:  # of a server that knows no ranges
                break
    return found[:count]
