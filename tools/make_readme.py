"""Make README.md from nbs/index.ipynb: `python tools/make_readme.py`, or with --check only say
whether they agree. It is read on GitHub and on a package index: its links are whole addresses."""

import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path
from posixpath import normpath

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "nbs" / "index.ipynb"
README = ROOT / "README.md"
NOTE = (
    "<!-- Made from nbs/index.ipynb by tools/make_readme.py: "
    "edit the notebook, then run the tool. -->"
)
HIDDEN = {"hide", "export", "exporti", "default_exp"}


def git_url() -> str:
    """Where the repository is seen on the web."""
    config = ConfigParser(delimiters=("=",), interpolation=None)
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]["git_url"]


def repository_url() -> str:
    """Where a file of the repository is seen on the web, without its path."""
    return git_url() + "/blob/main/"


def raw_url() -> str:
    """Where a file of the repository is fetched as it is, without its path: pictures."""
    return git_url().replace("//github.com/", "//raw.githubusercontent.com/") + "/main/"


def address(target: str, picture: bool = False) -> str:
    """What a target of index.ipynb, relative to nbs/, is on the web. A package index has no files
    beside README, and no anchors for its headings, so nothing may be relative."""
    if re.match(r"[a-z]+:", target):
        return target
    if target.startswith("#"):
        return git_url() + target
    return (raw_url() if picture else repository_url()) + normpath(f"nbs/{target}")


def plain(markdown: str) -> str:
    """Markdown that every reader knows: without Quarto's divs and attributes, every link and image
    with its whole address; fenced blocks stay as they are."""

    def converted(block: str) -> str:
        if block.startswith("```"):
            return block
        block = re.sub(r"^:::.*\n?", "", block, flags=re.MULTILINE)
        # a picture of the site has a caption and a description; here the description counts
        described = r"!\[[^\[\]]*\](\([^()\s]+\))\{fig-alt=\"([^\"]*)\"[^{}]*\}"
        block = re.sub(described, r"![\2]\1", block)
        block = re.sub(r"(?<=\))\{[^}\n]*\}|[ \t]+\{[#.][^}\n]*\}[ \t]*$", "", block, flags=re.M)
        block = re.sub(r"\n{3,}", "\n\n", block)
        # a picture may stand within a link, and its description holds no brackets
        link = r"(!\[[^\[\]]*)?\]\(([^()\s]+)\)"
        return re.sub(link, lambda m: f"{m[1] or ''}]({address(m[2], bool(m[1]))})", block)

    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(map(converted, blocks))


def directives(source: str) -> dict[str, str]:
    """The `#| name: value` lines that open a code cell."""
    lines = re.findall(r"^#\|\s*([\w-]+):?[ \t]*(.*)$", source, flags=re.MULTILINE)
    return {name: value.strip() for name, value in lines}


def output_markdown(output: dict) -> str:
    """One output of a code cell: Markdown as it is, text in a fence. Raises `ValueError` for a
    picture: these belong in nbs/images."""
    if output["output_type"] == "stream":
        return "```\n" + "".join(output["text"]).rstrip() + "\n```"
    data = output["data"]
    if "text/markdown" in data:
        return plain("".join(data["text/markdown"]).rstrip())
    if any(kind.startswith("image/") for kind in data):
        raise ValueError(
            "index.ipynb: a cell shows a picture; save it in nbs/images and link it from a "
            "Markdown cell"
        )
    return "```\n" + "".join(data["text/plain"]).rstrip() + "\n```"


def cell_parts(cell: dict) -> list[str]:
    """What README shows of a cell: nothing for hidden ones, else its text, or its code and then
    its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [plain(source)]
    flags = directives(source)
    if cell["cell_type"] != "code" or HIDDEN & flags.keys() or flags.get("include") == "false":
        return []
    code = re.sub(r"\A(#\|.*\n?)+", "", source).strip()
    shown = [f"```python\n{code}\n```"] if code and flags.get("echo") != "false" else []
    return shown + [output_markdown(output) for output in cell["outputs"]]


def readme() -> str:
    """The text of README.md, as nbs/index.ipynb asks for it."""
    cells = json.loads(INDEX.read_text(encoding="utf-8"))["cells"]
    parts = [part for cell in cells for part in cell_parts(cell)]
    return "\n\n".join([NOTE, *(part.strip() for part in parts if part.strip())]) + "\n"


def main() -> int:
    """Write README.md, or with --check compare it; the exit status."""
    if "--check" not in sys.argv[1:]:
        README.write_text(readme(), encoding="utf-8")
    elif not README.exists() or README.read_text(encoding="utf-8") != readme():
        print(
            "README.md differs from nbs/index.ipynb: run `python tools/make_readme.py`",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
