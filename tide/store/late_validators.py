"""Lets the lakeFS SDK be imported in a third of the time: its validators of arguments are made when a call needs them.

The SDK wraps each of its 292 methods in pydantic's ``validate_arguments`` while it is imported, which builds a model a
method: a second of CPU time before every `tide` command, for a handful of calls. Inside ``late_validators`` the
wrapping waits for the first call of a method; what it checks is the same. Knows nothing else of lakeFS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pydantic.v1


@contextmanager
def late_validators() -> Iterator[None]:
    """For the import of the SDK; nothing changes for what is imported already, or afterwards."""
    usual = pydantic.v1.validate_arguments
    vars(pydantic.v1)["validate_arguments"] = validated_at_first_call
    try:
        yield
    finally:
        vars(pydantic.v1)["validate_arguments"] = usual


def validated_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """``validate_arguments`` of the function, made when it is first called."""
    validated = functools.cache(lambda: pydantic.v1.validate_arguments(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return validated()(*args, **kwargs)

    return call
