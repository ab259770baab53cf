"""Back to the previous draft, as a new generation. `tide rollback` does the same with Prefect down."""

from __future__ import annotations

from prefect import flow

from tasks.promote import roll_back
from tide.domain import Promotion


@flow(name="rollback", log_prints=True)
def rollback(expected_generation: int | None = None, to: str | None = None) -> Promotion:
    """Put the previous draft, or another that was promoted before, back into serving on every replica.

    Args:
        expected_generation: the one to leave; with it, running this twice goes back once.
        to: ``gen-N``, or a promoted draft's digest or its beginning; the previous draft when None.
    """
    return roll_back(expected_generation, to)
