"""Names of models on the Hugging Face Hub: ORG/NAME, or ORG/NAME@REVISION."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

_FORM = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubId:
    """A model of the Hub.

    Attributes:
        repo: ORG/NAME.
        revision: a branch, tag or commit; "" for the main branch.
    """

    repo: str
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """Parse ORG/NAME[@REVISION]; None if the text has another form."""
        found = _FORM.fullmatch(text)
        return cls(found["repo"], found["revision"] or "") if found else None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubId:
        """The same model at another revision."""
        return replace(self, revision=revision)


def hub_id(text: str) -> HubId | None:
    """The model of the Hub that a setting names; None for a directory, or a text of another form."""
    return None if Path(text).is_dir() else HubId.parse(text)


def name_of(directory: Path) -> str:
    """Name of the model in a directory: ORG/NAME in huggingface_hub's cache, elsewhere the directory's name."""
    kind, _, repo = directory.parent.parent.name.partition("--")
    is_cached = kind == "models" and directory.parent.name == "snapshots"
    return repo.replace("--", "/", 1) if is_cached else directory.name
