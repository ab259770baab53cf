"""A store that tells somebody of every commit and every merge that it has made.

Owns that nothing is told before it happened, and nothing that did not. Knows nothing of who listens, or what the
commits mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from tide.store.base import Commit, Store

Listener = Callable[[str, str, Commit], None]
"""Called with repository, branch and the commit that is now its head. It must not raise: what it is told of is done."""


def telling(store: Store, listener: Listener) -> Store:
    """The same store, with a listener."""

    def commit(_: Store, repository: str, branch: str, message: str, metadata: Mapping[str, str]) -> Commit:
        made = store.commit(repository, branch, message, metadata)
        listener(repository, branch, made)
        return made

    def merge(_: Store, repository: str, source: str, into: str, message: str, metadata: Mapping[str, str]) -> Commit:
        made = store.merge(repository, source, into, message, metadata)
        listener(repository, into, made)
        return made

    # Every method of the port, whatever it will be: one that was forgotten here would act on no store at all.
    methods = {name: _passed_on(store, name) for name, value in vars(Store).items() if _is_public(name, value)}
    return cast(Store, type("TellingStore", (Store,), methods | {"commit": commit, "merge": merge})())


def _is_public(name: str, value: object) -> bool:
    return callable(value) and not name.startswith("_")


def _passed_on(store: Store, name: str) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: getattr(store, name)(*args, **kwargs)
