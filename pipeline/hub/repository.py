"""A repository on the Hub that we publish to: read its branches, and update them to our files."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from exl2flow.core.errors import HubError
from exl2flow.core.store.source import digests
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import MAIN

T = TypeVar("T")

KEPT = (".gitattributes",)  # the Hub's own
Contents = Mapping[str, Path | bytes]  # name → file or content


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository by name; `memory` is the file that caches digests of local files."""

    name: str
    hub: Hub
    memory: Path

    def _call(self, method: Callable[..., T], **options: Any) -> T:
        """Call a method of the client whose first argument is the name."""
        return self.hub.call(self.name, lambda: method(self.name, **options))

    def exists(self) -> bool:
        """Return whether it exists, as far as the token can see."""
        return self._call(self.hub.api.repo_exists)

    def create(self) -> None:
        """Create it as a private repository unless it exists."""
        self._call(self.hub.api.create_repo, private=True, exist_ok=True)

    def create_branch(self, branch: str) -> None:
        """Create a branch unless it exists."""
        self._call(self.hub.api.create_branch, branch=branch, exist_ok=True)

    def branches(self) -> dict[str, str]:
        """Return branch → commit."""
        refs = self._call(self.hub.api.list_repo_refs).branches
        return {ref.name: ref.target_commit for ref in refs}

    def set_private(self, private: bool) -> None:
        """Make it private or public, if necessary.

        Raises:
            HubError: the Hub reports success but did not do it.
        """
        if self._is_private() is private:
            return
        self._call(self.hub.api.update_repo_settings, private=private)
        if self._is_private() is not private:
            word = "private" if private else "public"
            raise HubError(f"the Hub did not make `{self.name}` {word}; check its settings")

    def _is_private(self) -> bool | None:
        return self._call(self.hub.api.model_info).private

    def files(self, revision: str) -> dict[str, RepoFile]:
        """Return name → file of a branch or commit, except files that the Hub adds."""
        return self.hub.call(self.name, lambda: self._files(revision))

    def _files(self, revision: str) -> dict[str, RepoFile]:
        tree = self.hub.api.list_repo_tree(self.name, revision=revision, recursive=True)
        return {f.path: f for f in tree if isinstance(f, RepoFile) and f.path not in KEPT}

    def download(self, commit: str, folder: Path, names: Sequence[str] | None = None) -> None:
        """Download files of a commit into a folder; all of them if `names` is None."""
        patterns = None if names is None else list(names)
        download = partial(
            self.hub.api.snapshot_download,
            self.name,
            revision=commit,
            local_dir=folder,
            allow_patterns=patterns,
        )
        self.hub.call(self.name, download, transfers=True)

    def changes(self, branch: str, contents: Contents) -> tuple[list[str], list[str]]:
        """Return the names that a branch lacks or has in another version, and those to delete."""
        return self.hub.call(self.name, lambda: self._changes(branch, contents))

    def _changes(self, branch: str, contents: Contents) -> tuple[list[str], list[str]]:
        present = self._files(branch)
        added = [
            name
            for name, content in contents.items()
            if name not in present or not self._is_same(present[name], content)
        ]
        extra = [] if branch == MAIN else [name for name in present if name not in contents]
        return added, extra

    def _is_same(self, present: RepoFile, content: Path | bytes) -> bool:
        """Compare by size and digest: sha256 for large files, git's digest for others."""
        if present.lfs is not None:
            return present.lfs.sha256 == self.sha256(content)
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if size != present.size:
            return False
        data = content.read_bytes() if isinstance(content, Path) else content
        return present.blob_id == git_hash(data)

    def sha256(self, content: Path | bytes) -> str:
        """Return the digest of content to send."""
        if isinstance(content, Path):
            return digests([content], self.memory)[content]
        return hashlib.sha256(content).hexdigest()

    def send(self, branch: str, contents: Contents, tick: Callable[[int, str], None]) -> list[str]:
        """Make a branch hold exactly these contents; return the names of the files sent.

        Large files are uploaded first, one by one; they stay on the Hub if a later one fails and
        are not sent again. One commit then changes the branch.

        Args:
            branch: must exist.
            contents: all files of the branch.
            tick: receives the number of files sent, and the name of the next.
        """

        def attempt() -> list[str]:
            added, gone = self._changes(branch, contents)
            if not added and not gone:
                return []
            adding = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=contents[name])
                for name in added
            ]
            for done, operation in enumerate(adding):
                tick(done, operation.path_in_repo)
                self.hub.api.preupload_lfs_files(self.name, [operation], revision=branch)
            self.hub.api.create_commit(
                self.name,
                [*adding, *(CommitOperationDelete(path_in_repo=name) for name in gone)],
                commit_message=f"Publish {branch}",
                revision=branch,
            )
            return added

        return self.hub.call(self.name, attempt, transfers=True)
