"""The store port on lakeFS, through its official SDK.

Owns the translation of the port's vocabulary into lakeFS calls: paging, streaming, and the two answers of lakeFS that
are not what they seem (a false "no changes", a retry of something that had been done). Knows nothing of shards.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import lakefs_sdk
from typing_extensions import override

from tide.errors import AlreadyExists, Conflict, NotFound, NothingToCommit, StoreUnavailable
from tide.files import sync_folder, temporary_beside
from tide.store.base import Change, Commit, ObjectInfo, Store
from tide.store.lakefs_client import TIMEOUT, LakefsClient
from tide.store.lakefs_erase import BlockAccess
from tide.store.lakefs_errors import Where, vendor_errors
from tide.store.lakefs_upload import Uploader

CHUNK = 1 << 20
"""Bytes moved at a time."""


class LakefsStore(Store):
    """A lakeFS server.

    Args:
        endpoint: ``http://host:port``.
        access_key, secret_key: a user's keys.
        namespace_prefix: where new repositories keep their bytes: ``local://`` or ``s3://bucket/prefix/``; the
            repository's name is appended.
        blocks: how the block store is reached where bytes must be deleted.
        attempts: how often a transient failure is tried in all, with jittered exponential waits.
        sleep: waits between attempts; tests pass a stub.
    """

    def __init__(
        self,
        endpoint: str,
        access_key: str,
        secret_key: str,
        namespace_prefix: str = "local://",
        *,
        blocks: BlockAccess | None = None,
        attempts: int = 6,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lakefs = LakefsClient(endpoint, access_key, secret_key, attempts, sleep)
        self._api, self._prefix = self._lakefs.api, namespace_prefix
        self._uploads = Uploader(self._lakefs)
        self._blocks = blocks or BlockAccess()

    # Repositories and branches

    @override
    def create_repository(self, repository: str) -> bool:
        where = Where("create repository", repository)
        namespace = f"{self._prefix}{repository}"
        try:
            with vendor_errors(where):  # the SDK checks the name itself
                creation = lakefs_sdk.RepositoryCreation(
                    name=repository, storage_namespace=namespace, default_branch="main"
                )
            self._lakefs.call(where, self._api.repositories_api.create_repository, creation)
        except Conflict:
            # The same answer is given when the name is free but its storage namespace was used before.
            self._lakefs.call(
                Where("open repository", repository), self._api.repositories_api.get_repository, repository
            )
            return False
        return True

    @override
    def repositories(self) -> Iterator[str]:
        for item in self._lakefs.pages(Where("list repositories"), self._api.repositories_api.list_repositories):
            yield item.id

    @override
    def protect(self, repository: str, branch: str) -> None:
        rules = [
            lakefs_sdk.BranchProtectionRule(pattern=p) for p in dict.fromkeys([*self.protected(repository), branch])
        ]
        where = Where("protect", repository, branch)
        self._lakefs.call(where, self._api.repositories_api.set_branch_protection_rules, repository, rules)

    @override
    def protected(self, repository: str) -> tuple[str, ...]:
        where = Where("read branch protection", repository)
        rules = self._lakefs.call(where, self._api.repositories_api.get_branch_protection_rules, repository)
        return tuple(rule.pattern for rule in rules)

    @override
    def create_branch(self, repository: str, branch: str, source: str) -> None:
        creation = lakefs_sdk.BranchCreation(name=branch, source=source)
        where = Where("create branch", repository, f"{branch} from {source}")
        try:
            self._lakefs.call(where, self._api.branches_api.create_branch, repository, creation)
        except Conflict:
            try:
                self._lakefs.call(where, self._api.branches_api.get_branch, repository, branch)
            except NotFound as error:
                raise AlreadyExists(f"{where}: a tag has this name, and branches and tags share their names") from error

    @override
    def branches(self, repository: str) -> Iterator[str]:
        for item in self._lakefs.pages(
            Where("list branches", repository), self._api.branches_api.list_branches, repository
        ):
            yield item.id

    @override
    def delete_branch(self, repository: str, branch: str) -> None:
        where = Where("delete branch", repository, branch)
        first = next(self.uncommitted(repository, branch), None)
        if first is not None:
            raise Conflict(f"{where}: it has uncommitted objects ({first.path}): commit or reset them first")
        self._lakefs.call(where, self._api.branches_api.delete_branch, repository, branch)

    # Objects

    @override
    def put(
        self, repository: str, branch: str, path: str, source: Path | bytes, *, if_absent: bool = False
    ) -> ObjectInfo:
        where = Where("put", repository, branch, path)
        return ObjectInfo(path=path, size=self._uploads.put(where, source, if_absent=if_absent))

    @override
    def open(self, repository: str, ref: str, path: str) -> AbstractContextManager[BinaryIO]:
        return self._stream(Where("read", repository, ref, path))

    @override
    def read(self, repository: str, ref: str, path: str) -> bytes:
        with self.open(repository, ref, path) as stream:
            return stream.read()

    @override
    def download(self, repository: str, ref: str, path: str, destination: Path) -> None:
        temporary = temporary_beside(destination)
        try:
            with self._stream(Where("download", repository, ref, path)) as stream, temporary.open("wb") as file:
                shutil.copyfileobj(stream, file, CHUNK)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(destination.parent)

    @contextmanager
    def _stream(self, where: Where) -> Iterator[BinaryIO]:
        with closing(io.BufferedReader(self._lakefs.stream(where), CHUNK)) as stream:
            yield stream

    @override
    def list(self, repository: str, ref: str, prefix: str = "") -> Iterator[ObjectInfo]:
        where = Where("list", repository, ref, prefix)
        for item in self._lakefs.pages(where, self._api.objects_api.list_objects, repository, ref, prefix=prefix):
            yield ObjectInfo(path=item.path, size=item.size_bytes or 0)

    @override
    def delete(self, repository: str, branch: str, path: str) -> None:
        where = Where("delete", repository, branch, path)
        try:
            self._lakefs.call(where, self._api.objects_api.delete_object, repository, branch, path)
        except NotFound:
            # The same answer for a missing object, which is fine, and for a missing branch, which is not.
            self._lakefs.call(where, self._api.branches_api.get_branch, repository, branch)

    # Versions

    @override
    def uncommitted(self, repository: str, branch: str) -> Iterator[Change]:
        where = Where("list uncommitted", repository, branch)
        for item in self._lakefs.pages(where, self._api.branches_api.diff_branch, repository, branch):
            yield Change(path=item.path, kind=item.type)

    @override
    def reset(self, repository: str, branch: str) -> None:
        creation = lakefs_sdk.ResetCreation(type="reset")
        self._lakefs.call(
            Where("reset", repository, branch), self._api.branches_api.reset_branch, repository, branch, creation
        )

    @override
    def commit(self, repository: str, branch: str, message: str, metadata: Mapping[str, str]) -> Commit:
        where = Where("commit", repository, branch)
        marks = _Marks(self.head(repository, branch).id, message, metadata, staged=True)
        creation = lakefs_sdk.CommitCreation(message=message, metadata=dict(metadata))
        return self._settle(where, branch, marks, self._api.commits_api.commit, repository, branch, creation)

    @override
    def head(self, repository: str, ref: str) -> Commit:
        return _commit(
            self._lakefs.call(Where("head", repository, ref), self._api.commits_api.get_commit, repository, ref)
        )

    @override
    def log(self, repository: str, ref: str) -> Iterator[Commit]:
        for item in self._lakefs.pages(Where("log", repository, ref), self._api.refs_api.log_commits, repository, ref):
            yield _commit(item)

    @override
    def merge(self, repository: str, source: str, into: str, message: str, metadata: Mapping[str, str]) -> Commit:
        where = Where("merge", repository, f"{source} into {into}")
        marks = _Marks(self.head(repository, into).id, message, metadata, staged=False)
        merge = lakefs_sdk.Merge(message=message, metadata=dict(metadata))
        return self._settle(
            where, into, marks, self._api.refs_api.merge_into_branch, repository, source, into, merge=merge
        )

    @override
    def diff(self, repository: str, left: str, right: str) -> Iterator[Change]:
        where = Where("diff", repository, f"{left}..{right}")
        # Two-dot compares the trees as they are; the default compares right with the common ancestor.
        pages = self._lakefs.pages(where, self._api.refs_api.diff_refs, repository, left, right, type="two_dot")
        for item in pages:
            yield Change(path=item.path, kind=item.type)

    @override
    def tag(self, repository: str, name: str, ref: str) -> None:
        where = Where("tag", repository, name)
        commit = self.head(repository, ref).id
        creation = lakefs_sdk.TagCreation(id=name, ref=commit)
        try:
            self._lakefs.call(where, self._api.tags_api.create_tag, repository, creation)
        except Conflict as error:
            try:
                found = self._lakefs.call(where, self._api.tags_api.get_tag, repository, name).commit_id
            except NotFound:
                raise AlreadyExists(f"{where}: a branch has this name, and they share their names") from error
            if found != commit:
                raise AlreadyExists(f"{where}: it names {found[:12]} for ever, not {commit[:12]}") from error

    @override
    def tags(self, repository: str) -> Iterator[tuple[str, str]]:
        for item in self._lakefs.pages(Where("list tags", repository), self._api.tags_api.list_tags, repository):
            yield item.id, item.commit_id

    # Bytes behind the versions

    @override
    def physical_address(self, repository: str, ref: str, path: str) -> str:
        where = Where("stat", repository, ref, path)
        found = self._lakefs.call(where, self._api.objects_api.stat_object, repository, ref, path)
        return str(found.physical_address)

    @override
    def require_erasable(self, repository: str) -> None:
        self._blocks.require(self._namespace(repository))

    @override
    def erase_bytes(self, repository: str, address: str) -> bool:
        return self._blocks.erase(self._namespace(repository), address)

    @override
    def expire_after(self, repository: str, days: int) -> None:
        # main by name as well: a default rule alone is overridden by any rule somebody set for it.
        rule = lakefs_sdk.GarbageCollectionRule(branch_id="main", retention_days=days)
        rules = lakefs_sdk.GarbageCollectionRules(default_retention_days=days, branches=[rule])
        where = Where("set garbage collection", repository)
        self._lakefs.call(where, self._api.repositories_api.set_gc_rules, repository, rules)

    @override
    def expires_after(self, repository: str) -> int | None:
        where = Where("read garbage collection", repository)
        try:
            rules = self._lakefs.call(where, self._api.repositories_api.get_gc_rules, repository)
        except NotFound:
            # The same answer for no rules and for no repository, which is an error.
            self._namespace(repository)
            return None
        return int(rules.default_retention_days)

    def _namespace(self, repository: str) -> str:
        where = Where("open repository", repository)
        return str(self._lakefs.call(where, self._api.repositories_api.get_repository, repository).storage_namespace)

    # How calls are made

    def _settle(
        self, where: Where, branch: str, marks: _Marks, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Commit:
        """Commit or merge, with the two false answers of "no changes" told from the true one.

        A retry finds nothing to do when the lost first try had succeeded: that commit is returned. A concurrent commit
        on the same branch can be told "no changes" while its objects are staged: that is tried again.
        """

        def attempt() -> str:
            try:
                with vendor_errors(where):
                    made = function(*args, **kwargs, **TIMEOUT)
                    return str(getattr(made, "reference", None) or made.id)
            except NothingToCommit as error:
                landed = next((c for c in self._since(where.repository, branch, marks.before) if marks.fits(c)), None)
                if landed is not None:
                    return landed.id
                if marks.staged and next(self.uncommitted(where.repository, branch), None) is not None:
                    raise StoreUnavailable(f"{where}: lakeFS saw no changes, but objects are staged") from error
                raise

        return self.head(where.repository, self._lakefs.retry(where, attempt))

    def _since(self, repository: str, branch: str, before: str) -> Iterator[Commit]:
        return itertools.takewhile(lambda commit: commit.id != before, self.log(repository, branch))


@dataclass(frozen=True)
class _Marks:
    """How a commit that we asked for is recognised."""

    before: str
    message: str
    metadata: Mapping[str, str]
    staged: bool

    def fits(self, commit: Commit) -> bool:
        """Whether this commit is the one asked for."""
        return commit.message == self.message and commit.metadata == dict(self.metadata)


def _commit(item: Any) -> Commit:
    return Commit(
        id=item.id,
        message=item.message,
        # lakeFS adds entries of its own to a merge.
        metadata={key: value for key, value in (item.metadata or {}).items() if not key.startswith(".lakefs.")},
        parents=tuple(item.parents),
        created_at=float(item.creation_date),
    )
