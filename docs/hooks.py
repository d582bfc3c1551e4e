"""Makes the home page from README.md, so that there is one text."""

from __future__ import annotations

import pathlib
import re
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def on_page_read_source(page: Any, config: Any) -> str | None:
    """Returns README.md for index.md, with its links as seen from docs/."""
    if page.file.src_uri != "index.md":
        return None
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](")
    # Files outside docs/ are not part of the site.
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]*/)?([\w.-]+\.(?:py|md|jsonl))\)", _link, text)


def _link(found: re.Match[str]) -> str:
    label, folder, name = found.groups()
    if folder is None and (_ROOT / "docs" / name).exists():
        return found[0]
    return f"`{folder or ''}{name}`" if label.endswith((".py", ".md")) else f"{label} (`{folder or ''}{name}`)"
