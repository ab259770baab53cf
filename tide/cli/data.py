"""Commands on captured data: erasing whose rows must go.

Owns how ids are given and how they become the hashes that capture wrote. The work is that of tide.erasure.erase.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field, ValidationError

from tide import wiring
from tide.cli.common import DEFAULT_HOME, AsJson, Home, use_stack
from tide.config import Settings
from tide.domain import Value
from tide.errors import BadInputError, ConfigError
from tide.sglang_plugin.admission import conversation_hash, request_hash, session_hash
from tide.sglang_plugin.settings import HASH_KEY_FILE

if TYPE_CHECKING:
    from tide.erasure.erase import ErasureResult
    from tide.erasure.scan import Subjects

commands = typer.Typer()
_HASH = re.compile(r"^[0-9a-f]{8,64}$")


class Named(Value):
    """One line of a file of ids."""

    conversation: str | None = Field(default=None, min_length=1)
    request: str | None = Field(default=None, min_length=1)


@commands.command()
def erase(
    conversation: Annotated[list[str] | None, typer.Option(help="As the client named it; repeatable.")] = None,
    request: Annotated[
        list[str] | None,
        typer.Option(help="Id of one request; repeatable. Later turns repeat earlier ones: see --conversation."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSON lines of {"conversation": "..."} or {"request": "..."}.')
    ] = None,
    hashed: Annotated[bool, typer.Option("--hashed", help="The ids are hashes already, as tables have them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Take rows out of live states and delete every old copy of them, so that older refs answer that they are gone.

    Run it on the serving host, whose spool it cleans as well; with several hosts, on each. Repeat it after a harvest:
    rows that the engine still held are written later. Weights are not changed.
    """
    from tide.erasure.erase import Eraser  # pulls in torch

    named = [Named(conversation=c) for c in conversation or ()] + [Named(request=r) for r in request or ()]
    named += _read(file) if file else []
    config = use_stack(home)
    subjects = _subjects(named, config, hashed=hashed)
    eraser = Eraser(
        store=wiring.store(config),
        states=config.states_repository,
        drafts=config.drafts_repository,
        spool_folder=config.spool_folder,
        home=config.home,
    )
    result = eraser.run(subjects, dry_run=dry_run)
    print(result.to_json() if as_json else _text(result))
    raise typer.Exit(int(bool(result.downloads.busy)))


def _read(file: Path) -> list[Named]:
    """Ids of a file. Raises BadInputError naming the line."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = Named.model_validate_json(line)
        except ValidationError as error:
            detail = error.errors()[0]["msg"]
            raise BadInputError(f'{file}, line {number}: {detail}; expected {{"conversation": "c-17"}}') from error
        if (one.conversation is None) == (one.request is None):
            raise BadInputError(f"{file}, line {number}: expected a conversation or a request, and not both")
        found.append(one)
    return found


def _subjects(named: list[Named], config: Settings, *, hashed: bool) -> Subjects:
    from tide.erasure.scan import Subjects  # pulls in pyarrow, which no other command waits for

    conversations = [n.conversation for n in named if n.conversation is not None]
    requests = [n.request for n in named if n.request is not None]
    if not conversations and not requests:
        raise BadInputError("nothing to erase: name it by --conversation, --request or --file")
    if hashed:
        for given in (*conversations, *requests):
            if not _HASH.match(given):
                raise BadInputError(
                    f"{given!r} is no hash: lower-case hexadecimal digits, as the request table has them"
                )
        return Subjects(conversations=tuple(sorted(set(conversations))), requests=tuple(sorted(set(requests))))
    key = _hash_key(config)
    # A conversation is known by the name that its client gave or by its session: the id may be either.
    both = {name(key, c) for c in conversations for name in (conversation_hash, session_hash)}
    return Subjects(conversations=tuple(sorted(both)), requests=tuple(sorted({request_hash(key, r) for r in requests})))


def _hash_key(config: Settings) -> bytes:
    """The key that the replicas hash with. Never made here: a new one would find nothing."""
    if key := wiring.hash_key(config):
        return key
    path = config.spool_folder / HASH_KEY_FILE
    try:
        return path.read_text().strip().encode()
    except OSError as error:
        raise ConfigError(
            f"ids are hashed with the replicas' key, and there is none: {path}: {error.strerror}; run this on the "
            "serving host, set TIDE_HASH_KEY, or give hashes with --hashed"
        ) from error


def _text(result: ErasureResult) -> str:
    verb = "would be erased" if result.dry_run else "erased"
    lines = [f"erasure {result.id}"]
    for e in result.erasures:
        lines.append(
            f"  {verb}: {e.erased_requests} requests in {len(e.objects)} stored objects; "
            f"{len(e.commits)} states commits are not reproducible, {e.other_requests} requests of others "
            "are lost in them and stay on main"
        )
        lines += [f"  trained on it, not changed: draft {draft}" for draft in e.drafts]
    lines.append(f"  main: {result.live_objects} objects written again")
    where = result.spool.spool or "no spool on this machine: run it on every serving host"
    lines.append(f"  spool: {where}: {len(result.spool.rewritten)} files written again")
    gone = [*result.spool.removed, *result.downloads.removed]
    lines += [f"  local copy removed: {path}" for path in gone]
    lines += [f"  quarantined, does not say whose it is, delete it by hand: {p}" for p in result.spool.unreadable]
    lines += [
        f"  a training run may use {path}: when it has ended, wait an hour or delete it, and erase again"
        for path in result.downloads.busy
    ]
    return "\n".join(lines)
