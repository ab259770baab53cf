"""Makes what serving and training start from: ``python -m infra.prepare --home DIR``.

Owns the list of those things and the file that says where they are. A program of its own, so that the command that
starts a stack never imports torch, and other parts start meanwhile. Everything is reused by digest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from infra.files import write_private
from infra.models import ensure_target_model, untrained_draft
from infra.prepared import PREPARED_FILE, Prepared
from tide import wiring


def main() -> int:
    """Make the target model, an untrained draft and the head-only bundle; say where they are."""
    parser = argparse.ArgumentParser(prog="python -m infra.prepare", description=main.__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--dtype", default=None, help="what the engine computes in; the model's own when not given")
    wanted = parser.parse_args()
    home = wanted.home.absolute()
    model = ensure_target_model(home, _say)
    draft = untrained_draft(model, home)
    _say(f"untrained draft: {draft}")
    bundle = wiring.trainer().prepare_bundle(model, home / "bundle", wanted.dtype)
    _say(f"head-only bundle: {bundle}")
    write_private(home / PREPARED_FILE, Prepared(model=model, draft=draft, bundle=bundle).model_dump_json())
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
