"""Names from outside that become parts of paths: what they must be before they may.

Owns the two shapes (a digest, a plain name). Knows nothing of what is named, of folders or of stores. A name that is
refused is shown cut short and quoted, so that it cannot fake a message.
"""

from __future__ import annotations

import re

from tide.errors import BadInputError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHOWN = 80


def is_digest(text: str) -> bool:
    """True for 64 lower-case hexadecimal digits: a name that cannot lead out of a folder."""
    return _DIGEST.fullmatch(text) is not None


def is_plain(text: str) -> bool:
    """True for one path component of letters, digits, ``.``, ``_`` and ``-`` that does not begin with a dot."""
    return _PLAIN.fullmatch(text) is not None


def require_digest(text: str, what: str) -> str:
    """The digest itself. Raises BadInputError when it is anything else, a path for example.

    Args:
        what: what is named, for the message.
    """
    if not is_digest(text):
        raise BadInputError(f"{text[:_SHOWN]!r} is no {what}: 64 lower-case hexadecimal digits, never a path")
    return text


def require_plain(text: str, what: str) -> str:
    """The name itself. Raises BadInputError when it could lead out of a folder, or into another.

    Args:
        what: what is named, for the message.
    """
    if not is_plain(text):
        raise BadInputError(
            f"{text[:_SHOWN]!r} is no {what}: letters, digits, '.', '_' and '-', not beginning with a dot, "
            "at most 128 of them"
        )
    return text
