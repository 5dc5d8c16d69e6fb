"""Check that everything the site points at is there. Run after `nbdev-proc-nbs`
and `python tools/finish_pages.py`: `python tools/check_links.py`.

Looked at: links, images and cross-references of every processed notebook (Markdown cells and
Markdown or HTML outputs, which include the API links nbdev adds), what its cells say to Quarto,
which stops at a mistake there, links of README.md, and the sidebar. Addresses of the project's own
site and repository count as internal; other web addresses are not fetched.
"""

import json
import re
import sys
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from make_readme import ROOT, repository_url

PROCESSED, NOTEBOOKS = ROOT / "_proc", ROOT / "nbs"
CROSS_REFERENCE = r"(?:fig|tbl|sec|eq|lst|thm|lem|exm|def)-[\w-]+"
HEADING = r"^#{1,6}\s+(.+?)\s*#*$"
LINK = r"\]\(<?([^()\s>]*(?:\([^()\s]*\)[^()\s>]*)*)>?(?:\s+\"[^\"]*\")?\)"

NESTED = r"\[[^\[\]]*(?<!!)\[[^\[\]]*\]\([^()\s]*\)[^\[\]]*\]\([^()\s]+\)"


def slug(heading: str) -> str:
    """The id that Pandoc gives a heading: markup and most punctuation dropped, lower case,
    hyphens for spaces."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = unicodedata.normalize("NFC", re.sub(r"[`*$\\]", "", text)).lower()
    text = re.sub(r"[^\w\s.-]", "", text)
    return re.sub(r"^[\W\d_]+", "", re.sub(r"\s+", "-", text.strip())) or "section"


def without_blocks(markdown: str) -> str:
    """Markdown less its fenced blocks."""
    return re.sub(r"^(```+|~~~+).*?^\1`*\s*$", "", markdown, flags=re.DOTALL | re.MULTILINE)


def without_code(markdown: str) -> str:
    """Markdown less its fenced blocks, formulas and code spans; the text of a linked code span
    stays."""
    markdown = re.sub(r"\[`([^`]*)`\]", r"[\1]", without_blocks(markdown))
    markdown = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", markdown)
    return re.sub(r"\$\$.+?\$\$|\$(?!\s)[^$\n]+?(?<!\s)\$(?!\d)", "", markdown, flags=re.DOTALL)


@dataclass
class Page:
    """What a processed notebook offers and asks for."""

    path: Path  # relative to the site's root, with its own suffix
    output: Path  # relative to the site's root, the file a browser sees
    anchors: set[str] = field(default_factory=set)
    targets: list[str] = field(default_factory=list)
    references: set[str] = field(default_factory=set)
    nested: list[str] = field(default_factory=list)  # links inside the text of links

    def add(self, markdown: str) -> None:
        """Take in a piece of Markdown or HTML."""
        text = without_code(markdown)
        for heading in re.findall(HEADING, without_blocks(markdown), flags=re.MULTILINE):
            self.add_heading(heading)
        self.anchors |= set(re.findall(r"\{[^}\n]*#([\w:.-]+)", text))
        self.anchors |= set(re.findall(r"\bid=[\"']([^\"']+)", text))
        self.targets += re.findall(LINK, text)
        self.nested += re.findall(NESTED, without_blocks(markdown))
        self.targets += re.findall(r"^\[[^\]]+\]:\s+(\S+)", text, flags=re.MULTILINE)
        self.targets += re.findall(r"\b(?:src|href)=[\"']([^\"']+)", text)
        self.references |= set(re.findall(rf"(?<![\w.])@({CROSS_REFERENCE})", text))

    def add_heading(self, heading: str) -> None:
        """Take in the anchor of a heading: its own or its slug, with a number if that is taken."""
        explicit = re.search(r"\{[^}]*#([\w:.-]+)[^}]*\}\s*$", heading)
        base = explicit[1] if explicit else slug(re.sub(r"\{[^}]*\}\s*$", "", heading))
        alike = re.compile(re.escape(base) + r"(-\d+)?")
        count = sum(alike.fullmatch(anchor) is not None for anchor in self.anchors)
        self.anchors.add(base if explicit or not count else f"{base}-{count}")


def read_page(path: Path) -> Page:
    """A processed notebook's page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    relative = path.relative_to(PROCESSED)
    page = Page(relative, relative.with_suffix(".html"))
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "raw" and source.startswith("---"):
            front = yaml.safe_load(source.strip().strip("-")) or {}
            page.output = relative.with_name(front.get("output-file", page.output.name))
        elif cell["cell_type"] == "markdown":
            page.add(source)
            page.anchors |= {f"attachment:{name}" for name in cell.get("attachments", {})}
        elif cell["cell_type"] == "code":
            page.anchors |= set(re.findall(r"^#\|\s*label:\s*(\S+)", source, flags=re.MULTILINE))
            for output in cell["outputs"]:
                for kind in ("text/markdown", "text/html"):
                    page.add("".join(output.get("data", {}).get(kind, "")))
    return page


def problem(
    target: str, page: Page, pages: dict[Path, Page], site: str, repository: str
) -> str | None:
    """What is wrong with a link target on a page, or None."""
    if target.startswith("attachment:"):
        return None if target in page.anchors else "no such attachment"
    if target.startswith(repository):
        path = target[len(repository) :].split("#")[0].split("?")[0]
        return None if (ROOT / path).exists() else f"the repository has no {path}"
    if target.startswith(site):
        target, folder = target[len(site) :].lstrip("/") or "index.html", Path()
    elif re.match(r"[a-z][a-z+.-]*:|//", target, flags=re.IGNORECASE):
        return None
    else:
        folder = page.path.parent
    name, _, anchor = target.partition("#")
    resolved = (PROCESSED / folder / name.split("?")[0]).resolve()
    if not resolved.is_relative_to(PROCESSED):
        return "leads out of the site"
    there = page if not name else pages.get(resolved.relative_to(PROCESSED))
    if there is None:
        return None if resolved.is_file() else "no such page or file"
    return None if not anchor or anchor in there.anchors else f"{there.path} has no #{anchor}"


def link_problems() -> list[str]:
    """Links, images and cross-references of the processed notebooks that lead nowhere."""
    paths = [path for path in sorted(PROCESSED.rglob("*.ipynb")) if "_docs" not in path.parts]
    read = [read_page(path) for path in paths]
    pages = {name: page for page in read for name in (page.path, page.output)}
    settings = yaml.safe_load((PROCESSED / "nbdev.yml").read_text(encoding="utf-8"))["website"]
    repository = repository_url()
    found = []
    for page in read:
        for target in page.targets:
            if wrong := problem(target, page, pages, settings["site-url"], repository):
                found.append(f"{page.path}: {target}: {wrong}")
        found += [f"{page.path}: {link}: a link inside a link" for link in page.nested]
        for name in sorted(page.references - page.anchors):
            found.append(f"{page.path}: @{name}: no such label")
    return found


def option_problems() -> list[str]:
    """Cells whose options for Quarto are not YAML, and texts that are no lists of lines."""
    found = []
    for path in sorted(PROCESSED.rglob("*.ipynb")):
        if "_docs" in path.parts:
            continue
        name = path.relative_to(PROCESSED)
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if isinstance(cell["source"], str):
                found.append(f"{name}: cell {number} is one string: Quarto would lose its lines")
            opening = re.match(r"(#\|.*\n?)*", "".join(cell["source"]))[0]
            try:
                yaml.safe_load(re.sub(r"^#\| ?", "", opening, flags=re.MULTILINE))
            except yaml.YAMLError as error:
                wrong = str(error).partition("\n")[0]
                found.append(f"{name}: cell {number}: its options are not YAML: {wrong}")
    return found


def readme_problems() -> list[str]:
    """Links of README.md to files that are not there."""
    page = Page(Path("README.md"), Path("README.md"))
    page.add((ROOT / "README.md").read_text(encoding="utf-8"))
    local = [target for target in page.targets if not re.match(r"[a-z]+:", target)]
    inside = [target for target in local if target.startswith("#")]
    found = [target for target in inside if target[1:] not in page.anchors]
    others = [target for target in local if not target.startswith("#")]
    found += [target for target in others if not (ROOT / target.split("#")[0]).exists()]
    return [f"README.md: {target}: leads nowhere" for target in found]


def listed_pages(contents: list) -> list[str]:
    """The pages of a sidebar's contents, those of its sections too."""
    pages = []
    for item in contents:
        pages += listed_pages(item["contents"]) if "contents" in item else [item["href"]]
    return pages


def sidebar_problems() -> list[str]:
    """Differences between the sidebar of _quarto.yml and the notebooks there are."""
    website = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    listed = listed_pages(website["sidebar"]["contents"])
    paths = [path.relative_to(NOTEBOOKS) for path in NOTEBOOKS.rglob("*.ipynb")]
    there = {path.as_posix() for path in paths if not any(part[0] in "._" for part in path.parts)}
    twice = {page for page in listed if listed.count(page) > 1}
    found = [f"{page} is in the sidebar twice" for page in sorted(twice)]
    found += [f"{page} is in the sidebar, but not in nbs/" for page in sorted(set(listed) - there)]
    found += [f"{page} is in nbs/, but not in the sidebar" for page in sorted(there - set(listed))]
    return [f"_quarto.yml: {wrong}" for wrong in found]


def main() -> int:
    """Print what leads nowhere; the exit status."""
    if not PROCESSED.is_dir():
        print("No _proc folder: run `nbdev-proc-nbs` first", file=sys.stderr)
        return 2
    found = link_problems() + option_problems() + readme_problems() + sidebar_problems()
    print("\n".join(found) or "Every internal link, image and cross-reference resolves.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
