"""A window's way to main: put on a branch of its own, committed, checked, merged; then the branch is deleted.

Owns the layout of a window in the states repository and the order that makes this repeatable after a crash at any call.
Two harvesters that wrongly share a replica's name meet on one branch; neither may lose a file of the other. So only a
commit is merged that holds the window exactly as this run means it, made on the window as main held it; it is merged by
its id, for the branch may move meanwhile; and what is not so is a Conflict that leaves every file in its spool.

Works over the Store port; knows nothing of lakeFS, and does not judge what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tide.domain import WindowManifest
from tide.errors import Conflict, NotFound, NothingToCommit
from tide.lineage import metadata as lineage
from tide.names import require_plain
from tide.store.base import Commit, Store

ROOT = "windows/"
TABLE, MANIFEST = "requests.parquet", "manifest.json"


@dataclass(frozen=True)
class WindowBranch:
    """The branch of one window of one replica.

    Args:
        old: the window as main holds it; None when it does not.
        new: the window as this run leaves it.
    """

    store: Store
    repository: str
    old: WindowManifest | None
    new: WindowManifest

    @property
    def name(self) -> str:
        """The branch; one writer a branch."""
        return f"harvest-{self.new.window}-{self.new.replica}"

    @property
    def prefix(self) -> str:
        """Where the window stands in the repository."""
        return prefix(self.new.window, self.new.replica)

    def publish(self, files: Mapping[str, Path], small: Mapping[str, bytes]) -> None:
        """Bring the window to main; what an earlier run had put on the branch is not sent again.

        Args:
            files: what comes in, by path under the prefix.
            small: the same for what is in memory; the manifest is added.

        Raises:
            Conflict: another writes this window too. Nothing of this run is on main that main does not keep; the files
                stay where they are, and the next run takes the window as it is then.
        """
        small = {**small, MANIFEST: self.new.to_json().encode()}
        base = self.store.head(self.repository, "main").id
        if self._stored(base) != self.old:
            raise self._shared("main got another version of it meanwhile")
        try:
            commit = self._committed(base, files, small)
        except NotFound as error:
            raise self._shared("its branch was deleted meanwhile") from error
        with suppress(NothingToCommit):  # an earlier run merged, and ended before it could tell
            self.store.merge(self.repository, commit.id, "main", *self._words())
        if self._stored("main") != self.new:
            raise self._shared("main got another version of it while this one was merged")
        # Whoever stages on it now is told by its own check; what is staged never goes with a branch.
        with suppress(NotFound, Conflict):
            self.store.delete_branch(self.repository, self.name)

    def drop(self) -> None:
        """Delete what a broken-off run left: it is on main, still in the spool, or was taken away."""
        if self.name in self.store.branches(self.repository):
            with suppress(NotFound):  # another was faster
                self.store.reset(self.repository, self.name)
                self.store.delete_branch(self.repository, self.name)

    def _committed(self, base: str, files: Mapping[str, Path], small: Mapping[str, bytes]) -> Commit:
        """A commit that holds the window as meant, on the window as main held it."""
        held = self._sizes(base)
        wanted = held | {p: f.stat().st_size for p, f in files.items()} | {p: len(data) for p, data in small.items()}
        self._put(files, small, self._opened(base, held, wanted))
        try:
            commit = self.store.commit(self.repository, self.name, *self._words())
        except NothingToCommit:  # an earlier run committed, and ended before it merged
            commit = self.store.head(self.repository, self.name)
        self._check(commit, base, wanted, small)
        return commit

    def _opened(self, base: str, held: Mapping[str, int], wanted: Mapping[str, int]) -> Mapping[str, int]:
        """Sizes of what is on the branch already; one that this window cannot be built on is made anew."""
        self.store.create_branch(self.repository, self.name, base)
        present = self._sizes(self.name)
        head = self.store.head(self.repository, self.name).id
        if self._stored(head) in (self.old, self.new) and held.keys() <= present.keys() <= wanted.keys():
            return present
        self.drop()
        self.store.create_branch(self.repository, self.name, base)
        return self._sizes(self.name)

    def _put(self, files: Mapping[str, Path], small: Mapping[str, bytes], present: Mapping[str, int]) -> None:
        for path, file in files.items():
            if present.get(path) != file.stat().st_size:
                self.store.put(self.repository, self.name, self.prefix + path, file)
        for path, data in small.items():
            # A rewritten object would be a change to commit.
            if present.get(path) != len(data) or self._read(self.name, path) != data:
                self.store.put(self.repository, self.name, self.prefix + path, data)

    def _check(self, commit: Commit, base: str, wanted: Mapping[str, int], small: Mapping[str, bytes]) -> None:
        """Raise Conflict unless the commit is the window as meant, on the window as it was."""
        if self._sizes(commit.id) != wanted:
            raise self._shared("its branch holds other files than this spool's")
        for path in (TABLE, MANIFEST):
            if path in wanted and self._read(commit.id, path) != (small.get(path) or self._read(base, path)):
                raise self._shared(f"its branch holds another {path}")
        [parent] = commit.parents
        if self._stored(parent) != self.old:
            raise self._shared("its branch holds a commit that this spool's harvest did not make")

    def _stored(self, ref: str) -> WindowManifest | None:
        return stored(self.store, self.repository, ref, self.new.window, self.new.replica)

    def _sizes(self, ref: str) -> dict[str, int]:
        found = self.store.list(self.repository, ref, self.prefix)
        return {item.path.removeprefix(self.prefix): item.size for item in found}

    def _read(self, ref: str, path: str) -> bytes:
        return self.store.read(self.repository, ref, self.prefix + path)

    def _words(self) -> tuple[str, dict[str, str]]:
        """Message and metadata of the window's commit and merge."""
        record = lineage.states_record(self.new)
        return f"harvest {self.new.window} of {self.new.replica}", record.to_metadata()

    def _shared(self, what: str) -> Conflict:
        return Conflict(
            f"harvest: repository {self.repository}, ref {self.name}: another writes this window of replica "
            f"{self.new.replica} too ({what}). Every file is still in its spool: run again, and give every spool a "
            f"replica name of its own"
        )


def prefix(window: str, replica: str) -> str:
    """Where a window of a replica stands in the repository. Raises BadInputError for a name that is a path."""
    return f"{ROOT}{require_plain(window, 'window')}/{require_plain(replica, 'replica name')}/"


def stored(store: Store, repository: str, ref: str, window: str, replica: str) -> WindowManifest | None:
    """Manifest of a window at a ref; None when it holds no such window."""
    try:
        return WindowManifest.model_validate_json(store.read(repository, ref, prefix(window, replica) + MANIFEST))
    except NotFound:
        return None
