"""Links that lead nowhere, in Markdown files and built HTML pages. Links to the web are not checked.

``python -m tests.links DIRECTORY`` checks the pages in a directory, and fails on a broken link.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors and link targets of an HTML page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


class Markdown:
    """The link targets of a Markdown file, and its anchors as GitHub makes them of headings."""

    def __init__(self, path: Path):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        self.anchors, seen = set(), {}
        for heading in re.findall(r"^#{1,6} (.*)$", text, flags=re.MULTILINE):
            anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower())
            anchor = anchor.replace(" ", "-")
            number = seen.get(anchor, 0)
            seen[anchor] = number + 1
            self.anchors.add(f"{anchor}-{number}" if number else anchor)
        text = re.sub(r"`[^`\n]*`", "", text)
        self.links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)", text, flags=re.MULTILINE)


READERS = {".html": Page, ".md": Markdown}


def broken(path: Path) -> list[str]:
    """The page's links to missing files or anchors."""
    page, found = READERS[path.suffix](path), []
    pages = {path.resolve(): page}
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
        if not target.exists():
            found.append(link)
            continue
        if parts.fragment and target.suffix in READERS:
            other = pages[target] = pages.get(target) or READERS[target.suffix](target)
            if unquote(parts.fragment) not in other.anchors:
                found.append(link)
    return found


def main(directory: Path) -> int:
    pages = sorted(directory.rglob("*.html"))
    found = [f"{page}: {link}" for page in pages for link in broken(page)]
    print(*found, f"{len(pages)} pages, {len(found)} broken links", sep="\n")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
