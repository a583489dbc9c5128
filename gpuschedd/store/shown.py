"""Texts of users in what people read with `sqlite3`: nothing in them drives a terminal."""

from __future__ import annotations

#: Control characters, what turns the direction of writing, and what cannot be seen. Not NUL, which
#: no text of ours can hold and which SQLite cannot replace.
_UNSEEN = (
    *(*range(0x01, 0x20), *range(0x7F, 0xA0), 0xAD, 0x61C, 0x180E),
    *(*range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF),
)

#: The table of them, for `shown`.
UNSEEN_TABLE = (
    """CREATE TABLE unseen (
        number INTEGER PRIMARY KEY,
        code INTEGER NOT NULL,
        written TEXT NOT NULL)""",
    *(
        f"INSERT INTO unseen VALUES ({number}, {code},"
        f" '{chr(code).encode('unicode_escape').decode('ascii')}')"
        for number, code in enumerate(_UNSEEN)
    ),
)


def shown(column: str) -> str:
    """An SQL expression: the column's text as `gq` prints it, `ESC` as the four characters `\\x1b`.

    Nearly all texts hold plain ASCII and cost a comparison. The last part of a compound gives the
    expression its type, which is the column's.
    """
    is_plain = f"{column} NOT GLOB '*[^ -~]*'"
    return (
        f"(SELECT (WITH RECURSIVE step (number, text) AS (SELECT 0, {column} UNION ALL"
        " SELECT step.number + 1, replace(text, char(code), written)"
        " FROM step JOIN unseen ON unseen.number = step.number)"
        f" SELECT text FROM step WHERE number = {len(_UNSEEN)}) WHERE NOT ({is_plain})"
        f" UNION ALL SELECT {column} WHERE {is_plain})"
    )
