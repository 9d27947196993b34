"""Show only what is safe of texts and values from files that other programs wrote."""

from __future__ import annotations

LONGEST = 4096
"""Characters of a name, as Linux permits for a path; longer names are cut."""


def clean_text(text: str, longest: int = LONGEST) -> str:
    r"""Return a text of a file as one printable line of bounded length.

    >>> clean_text("caf\xe9\xad\x1b[2J\udc80"), clean_text("abcdef", 4)
    ('café��[2J�', 'abc…')
    """
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isprintable():
        return text
    # Terminal commands, line breaks, directions of writing, halves of surrogate pairs, which UTF-8 cannot encode.
    return "".join(character if character.isprintable() else "�" for character in text)


def encodable(text: str) -> str:
    r"""Return a text that UTF-8 can encode; the name of a file may have bytes that it cannot, which become `?`.

    >>> encodable("caf\udce9.py"), encodable("café.py")
    ('caf?.py', 'café.py')
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def shown(value: object) -> str:
    """Return a scalar of a file as text for a message, and the kind of anything else.

    Containers are not looked into: the text of nested ones can be longer than any memory.

    >>> shown("a\\nb"), shown(1 << 70), shown([[]])
    ("'a\\\\nb'", '1180591620717411303424', 'a list')
    """
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= 40 else value[:39] + "…")
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
