"""Text that came from elsewhere, made safe to show.

A prompt may hold anything: line breaks, escapes that repaint a terminal, characters that turn the writing direction.
Whatever does not print is spelled out instead.
"""

from __future__ import annotations

ELLIPSIS = "\u2026"


def visible(text: str) -> str:
    r"""The text with every character that does not print spelled as Python would, such as ``\n`` or ``\x1b``."""
    return "".join(map(_visible, text))


def cut(text: str, limit: int) -> tuple[str, bool]:
    """The begin of ``visible(text)``, and whether that is all of it.

    Args:
        text: Any text.
        limit: Bytes of UTF-8 at most; neither a character nor a spelled one is cut in two.
    """
    shown: list[str] = []
    for character in text:
        spelled = _visible(character)
        limit -= len(spelled.encode())
        if limit < 0:
            return "".join(shown), False
        shown.append(spelled)
    return "".join(shown), True


def _visible(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]
