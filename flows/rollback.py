"""Back to the previous draft, as a new generation. `tide rollback` does the same with Prefect down."""

from __future__ import annotations

from prefect import flow

from tasks.promote import roll_back
from tide.domain import Promotion


@flow(name="rollback", log_prints=True)
def rollback() -> Promotion:
    """Put the previous draft back into serving on every replica."""
    return roll_back()
