"""Models of the Hugging Face Hub, in the local cache of huggingface_hub.

    ORG/NAME[@REVISION] -- find --> a repository at one commit -- fetch --> a model directory

    HF_HOME/hub/models--ORG--NAME/
        refs/main                  commit of the branch at the last lookup
        snapshots/COMMIT/          the model directory: links to ...
        blobs/                     ... the files

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE from the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from raycache.checkpoint.hub_download import Download, FetchError, OnProgress, Transfer
from raycache.checkpoint.hub_errors import FAILURES, broken, is_away, refusal
from raycache.checkpoint.hub_files import HubFile, descriptions, weight_names
from raycache.checkpoint.hub_id import HubId
from raycache.checkpoint.hub_outline import outline
from raycache.checkpoint.tensor_files import INDEX, SINGLE, read_index
from raycache.errors import CheckpointError

_log = logging.getLogger(__name__)
_ANSWER_S = 20.0
_LOOK_S = 0.5
_STALE_S = 3600.0
"""Partial files that have not grown for this long are left over from a killed process."""


@dataclass(frozen=True)
class Repository:
    """The files of a model at a commit.

    Attributes:
        model: pinned to the commit.
        files: by name.
        is_listed: whether the Hub has listed the files; else these are the files in the cache.
    """

    model: HubId
    files: Mapping[str, HubFile]
    is_listed: bool


class Hub:
    """A Hub, and the local cache of its files. Defaults come from the environment.

    Args:
        endpoint: URL.
        token: by default that of the environment, or of `hf auth login`.
        pause_s: delay before the first retry of a failed download.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        cache_dir: Path | None = None,
        token: str | bool | None = None,
        pause_s: float = 1.0,
    ) -> None:
        self._api = HfApi(endpoint=endpoint, token=token, library_name="raycache")
        self._token, self._pause_s = token, pause_s
        self.endpoint = self._api.endpoint
        self.cache_dir = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()

    def find(self, model: HubId) -> Repository:
        """Look up the files of a model; in the cache if the Hub does not answer.

        Raises:
            CheckpointError: the model does not exist, is not accessible, or cannot be looked up.
        """
        try:
            found = self._ask(model)
        except FAILURES as cause:
            cached = self._find_cached(model) if is_away(cause) else None
            if cached is None:
                raise refusal(cause, model, endpoint=self.endpoint, has_token=self._has_token) from cause
            if not constants.is_offline_mode() and not model.is_pinned:
                _log.warning("%s does not answer; using %s of the cache", self.endpoint, cached.model)
            return cached
        if not model.is_pinned:
            self._note(model, found.model.revision)
        return found

    def folder(self, model: HubId) -> Path:
        """Directory of a pinned model, which may not exist yet."""
        return self._home(model) / "snapshots" / model.revision

    def fetch(self, repository: Repository, *, has_weights: bool, on_progress: OnProgress) -> Path:
        """Download the files of a model that are not in the cache.

        Args:
            has_weights: whether to download weights, and not only configuration and tokenizer.
        Returns:
            The model directory.
        Raises:
            CheckpointError: a file could not be downloaded or does not fit on the disk, or the model has no readable
                weights.
        """
        folder = self.folder(repository.model)
        self._get(repository, descriptions(repository.files), on_progress=lambda done, total: None)
        if has_weights:
            self._get(repository, self.weight_names(repository), on_progress=on_progress)
        return folder

    def weight_names(self, repository: Repository) -> list[str]:
        """Names of the weight files; the configuration must have been downloaded.

        Raises:
            CheckpointError: there are no readable weights.
        """
        folder = self.folder(repository.model)
        if repository.is_listed:
            return weight_names(folder, repository.files, model=repository.model.repo)
        if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
            return sorted(set(read_index(folder / INDEX).values()))
        return [SINGLE]

    def outline(self, repository: Repository, *, scratch: Path) -> Path:
        """A model directory for checks before the download, with only the headers of missing weights.

        Args:
            repository: its configuration must have been downloaded.
            scratch: parent of the directory, if one has to be made.
        Raises:
            CheckpointError: see `fetch`.
        """
        model, source = repository.model, self.folder(repository.model)
        missing = self.missing(repository, self.weight_names(repository))
        if not missing:
            return source
        if not repository.is_listed:
            self._refuse_incomplete(repository, missing)
        folder = scratch / source.relative_to(self.cache_dir)
        try:
            outline(model, source, missing, folder=folder, endpoint=self.endpoint, token=self._token)
        except FAILURES as cause:
            raise refusal(cause, model, endpoint=self.endpoint, has_token=self._has_token) from cause
        return folder

    def missing(self, repository: Repository, names: list[str]) -> list[HubFile]:
        """Files that are not in the cache."""
        folder = self.folder(repository.model)
        files = [repository.files.get(name, HubFile(name)) for name in names]
        return [file for file in files if not file.is_at(folder / file.name)]

    def _get(self, repository: Repository, names: list[str], *, on_progress: OnProgress) -> None:
        missing = self.missing(repository, names)
        if not missing:
            return
        if not repository.is_listed:
            self._refuse_incomplete(repository, missing)
        model, home = repository.model, self._home(repository.model)
        total = sum(repository.files[name].size or 0 for name in names)

        def is_done() -> bool:
            on_progress(min(_arrived(home), total), total)
            return not self.missing(repository, names)

        with _held(home, is_done=is_done):
            missing = self.missing(repository, names)
            if not missing:
                return
            _remove_leftovers(home)
            needed = sum(file.size or 0 for file in missing)
            self._require_space(needed, model)
            download = Download(
                missing, folder=self.folder(model), transfer=self._transfer_of(model), pause_s=self._pause_s
            )
            try:
                download.run(on_progress, done=total - needed, total=total)
            except FetchError as failed:
                raise self._explained(failed, model) from failed.__cause__

    def _transfer_of(self, model: HubId) -> Transfer:
        def transfer(name: str, *, counter: type) -> Path:
            path = hf_hub_download(
                model.repo,
                name,
                revision=model.revision,
                endpoint=self.endpoint,
                cache_dir=self.cache_dir,
                token=self._token,
                library_name="raycache",
                tqdm_class=counter,
            )
            return Path(path)

        return transfer

    def _explained(self, failed: FetchError, model: HubId) -> CheckpointError:
        cause = failed.__cause__
        if isinstance(cause, LocalEntryNotFoundError):  # says why in its cause
            cause = cause.__cause__ or cause
        assert cause is not None, "it is raised from one"
        if isinstance(cause, HfHubHTTPError) and not is_away(cause):
            return refusal(cause, model, endpoint=self.endpoint, has_token=self._has_token)
        return broken(cause, model, failed.name, folder=self.cache_dir)

    def _ask(self, model: HubId) -> Repository:
        for pause_s in (self._pause_s, 4 * self._pause_s, 0.0):
            try:
                info = self._api.model_info(
                    model.repo, revision=model.revision or None, files_metadata=True, timeout=_ANSWER_S
                )
                break
            except FAILURES as cause:
                if not (isinstance(cause, HfHubHTTPError) and is_away(cause) and pause_s):
                    raise
                time.sleep(pause_s)
        files = [
            HubFile(one.rfilename, one.size, one.lfs.sha256 if one.lfs else one.blob_id or "")
            for one in info.siblings or ()
        ]
        if not info.sha:
            raise ValueError("it names no commit")
        return Repository(model.at(info.sha), {file.name: file for file in files}, is_listed=True)

    def _note(self, model: HubId, commit: str) -> None:
        """Record the commit of a branch like huggingface_hub, for lookups when the Hub does not answer."""
        path = self._home(model) / "refs" / (model.revision or constants.DEFAULT_REVISION)
        with contextlib.suppress(OSError):  # a cache that is not written to
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}.{os.getpid()}")
            scratch.write_text(commit)
            scratch.replace(path)

    def _find_cached(self, model: HubId) -> Repository | None:
        revision = model.revision or constants.DEFAULT_REVISION
        found = try_to_load_from_cache(model.repo, "config.json", cache_dir=self.cache_dir, revision=revision)
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
        files = [HubFile(path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file()]
        return Repository(model.at(folder.name), {file.name: file for file in files}, is_listed=False)

    def _refuse_incomplete(self, repository: Repository, missing: list[HubFile]) -> None:
        lacks = [file.name for file in missing]
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{self.endpoint} does not answer"
        raise CheckpointError(
            f"{self.folder(repository.model)} lacks {len(lacks)} files of {repository.model.repo}, and {why}: "
            f"{', '.join(lacks[:5])}{', ...' if len(lacks) > 5 else ''}"
        )

    def _require_space(self, needed: int, model: HubId) -> None:
        free = shutil.disk_usage(self._home(model)).free
        if needed > free:
            raise CheckpointError(
                f"{model.repo} needs {needed / 1e9:.1f} GB more in {self.cache_dir}, {free / 1e9:.1f} GB are free; "
                "free some, or set HF_HOME to a larger disk"
            )

    def _home(self, model: HubId) -> Path:
        return self.cache_dir / f"models--{model.repo.replace('/', '--')}"

    @property
    def _has_token(self) -> bool:
        return bool(self._token or (self._token is None and get_token()))


@contextlib.contextmanager
def _held(home: Path, *, is_done: Callable[[], bool]) -> Iterator[None]:
    """Lock a folder for downloads of this process; the lock ends with the process.

    Args:
        is_done: polled while another process holds the lock: whether to stop waiting for it.

    Raises:
        CheckpointError: the folder is not writable.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / ".raycache.lock").open("w")
    except OSError as cause:
        raise CheckpointError(
            f"{home} cannot be written to ({cause.strerror}); set HF_HOME to where it can be"
        ) from cause
    with lock:
        while not _is_locked(lock.fileno()) and not is_done():
            time.sleep(_LOOK_S)
        yield


def _is_locked(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks; huggingface_hub does without them, too
    return True


def _remove_leftovers(home: Path) -> None:
    """Remove partial files of killed processes, which huggingface_hub does not resume."""
    for path in (home / "blobs").glob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # a download without our lock has ended
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _arrived(home: Path) -> int:
    """Bytes of complete and partial files."""
    arrived = 0
    for path in (home / "blobs").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed since, for it is complete
            arrived += path.stat().st_size
    return arrived
