"""Finish the pages that `nbdev-proc-nbs` made: `python tools/finish_pages.py`.

nbdev shows what a definition is called and takes. Readers want the algorithm too, the methods of a
class, its fields, and one list of all names. All that is made here, from the code itself:

- in the rooms of the method the code of every definition is open; elsewhere its signature and
  docstring are, a class has a table of its fields and an entry for each method, and the code is
  folded;
- cells that only import are folded;
- the first use of each term of the glossary on a page leads there;
- a code span inside a link is one link;
- options of several lines (captions, alternative texts), which nbdev cuts apart, are whole again;
- `names.ipynb` lists every public name by room.

With `--twins FOLDER` it writes each finished page as Markdown into the folder of the rendered site,
beside its HTML: `dpp.html.md` beside `dpp.html`, where the docstrings of modules point.
"""

import ast
import html
import io
import json
import re
import sys
import tokenize
from importlib import import_module
from pathlib import Path

import yaml
from check_links import slug
from make_readme import ROOT
from nbdev.doclinks import NbdevLookup

NOTEBOOKS, PROCESSED = ROOT / "nbs", ROOT / "_proc"
OPEN = {"moe", "describe", "client", "server", "baselines"}  # whose code is the method
SOURCE = r"\[source\]\((\S+?)\)"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def markdown(text: str) -> dict:
    """A cell of text."""
    return dict(cell_type="markdown", metadata={}, source=text)


def code(text: str, options: str = "") -> dict:
    """A cell of code without outputs."""
    cell = dict(cell_type="code", metadata={}, outputs=[], execution_count=None)
    return cell | dict(source=options + text)


# ---- what a definition says of itself


def public(name: str) -> bool:
    """Whether a name is for users."""
    return not name.startswith("_")


def comments(text: str) -> dict[int, tuple[str, bool]]:
    """Line number -> its comment, and whether it stands alone on its line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found[token.start[0]] = token.string.lstrip("# ").strip(), alone
    return found


def comment_of(node: ast.stmt, said: dict[int, tuple[str, bool]]) -> str:
    """What is said beside a field, or on the lines right above it."""
    beside = said.get(node.end_lineno)
    if beside and not beside[1]:
        return beside[0]
    lines, line = [], node.lineno - 1
    while line in said and said[line][1]:
        lines.insert(0, said[line][0])
        line -= 1
    return " ".join(lines)


def fields(node: ast.ClassDef, text: str) -> list[tuple[str, str, str, str]]:
    """Name, type, default and comment of every public field of a class."""
    said = comments(text)
    return [
        (
            item.target.id,
            ast.unparse(item.annotation),
            ast.get_source_segment(text, item.value) if item.value else "",
            comment_of(item, said),
        )
        for item in node.body
        if isinstance(item, ast.AnnAssign) and public(item.target.id)
    ]


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """The public methods that stand in the body of a class, without setters of properties."""
    found = [x for x in node.body if isinstance(x, DEFINITIONS[:2]) and public(x.name)]
    marks = {x: [ast.unparse(mark) for mark in x.decorator_list] for x in found}
    return [x for x in found if not any(mark.endswith(".setter") for mark in marks[x])]


def dedented(lines: list[str]) -> str:
    """Lines without the indentation of the first."""
    depth = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[depth:] for line in lines)


def signature(node: ast.stmt, text: str) -> str:
    """A definition as it was written, down to its colon; of a class, what makes one."""
    if isinstance(node, ast.ClassDef):
        made = [x for x in node.body if getattr(x, "name", "") == "__init__"]
        return signature(made[0], text) if made else ""
    lines = text.splitlines()
    marks = [f"@{ast.unparse(x)}" for x in node.decorator_list]
    kept = [mark for mark in marks if not mark.startswith(("@patch", "@torch"))]
    head = lines[node.lineno - 1 : node.body[0].lineno - 1] or [lines[node.lineno - 1]]
    return "\n".join([*kept, dedented(head)])


def docstring(node: ast.stmt) -> str:
    """What a definition says of itself, in one paragraph or more."""
    return ast.get_docstring(node) or ""


# ---- entries of the reference


def cell_text(text: str) -> str:
    """Text for a cell of a pipe table."""
    return text.replace("|", "\\|")


def code_text(text: str) -> str:
    """A code span for a cell of a pipe table; with a bar in it, as HTML, which takes one."""
    if "|" in text:
        return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def field_table(node: ast.ClassDef, text: str) -> str:
    """The fields of a class as a table; nothing if it has none."""
    rows = [
        f"| {code_text(name)} | {code_text(kind)} | {code_text(default)} | {cell_text(said)} |"
        for name, kind, default, said in fields(node, text)
    ]
    head = ["| field | type | default | |", "|:--|:--|:--|:------|"]
    return "\n".join([*head, *rows]) if rows else ""


def heading(name: str, level: int, source: str) -> str:
    """A heading that can be pointed at, and a link to the source."""
    link = f'\n\n[source]({source}){{.source target="_blank"}}' if source else ""
    return f"{'#' * level} {name} {{#{name.lower()}}}{link}"


def fenced(text: str) -> str:
    """A block of code; nothing for none."""
    return f"```python\n{text}\n```" if text else ""


def described(node: ast.stmt, name: str, text: str, source: str) -> str:
    """The entry of a definition whose code is folded."""
    parts = [heading(name, 3, source), fenced(signature(node, text)), docstring(node)]
    if isinstance(node, ast.ClassDef):
        parts.append(field_table(node, text))
        for method in methods(node):
            parts.append(heading(f"{name}.{method.name}", 4, ""))
            parts += [fenced(signature(method, text)), docstring(method)]
    return "\n\n".join(part for part in parts if part)


def opened(node: ast.stmt, name: str, source: str) -> str:
    """The heading of a definition whose code stands below it, and anchors for its methods."""
    inside = methods(node) if isinstance(node, ast.ClassDef) else []
    anchors = "".join(f"[]{{#{name.lower()}.{method.name.lower()}}}" for method in inside)
    return f"{heading(name, 3, source)}\n\n{anchors}".rstrip()


def segments(text: str) -> list[tuple[ast.stmt | None, str]]:
    """A cell's code, cut before each public definition; what stands before the first goes with
    it, and private parts with what they follow."""
    tree, lines = ast.parse(text), text.splitlines()
    starts = [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node)
        for node in tree.body
        if isinstance(node, DEFINITIONS) and public(node.name)
    ]
    if not starts:
        return [(None, text)]
    cuts = []
    for line, node in starts:
        while line > 1 and lines[line - 2].startswith("#"):  # comments above a definition
            line -= 1
        cuts.append((line - 1, node))
    cuts[0] = 0, cuts[0][1]
    ends = [start for start, _ in cuts[1:]] + [len(lines)]
    return [
        (node, "\n".join(lines[start:end]).strip("\n")) for (start, node), end in zip(cuts, ends)
    ]


def full_name(node: ast.stmt) -> str:
    """The name of a definition; `Class.name` for what fastcore patches into a class."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if getattr(called, "id", "") == "patch":
            first = (node.args.posonlyargs + node.args.args)[0]
            return f"{ast.unparse(first.annotation)}.{node.name}"
    return node.name


def entries(text: str, sources: dict[str, str], shown: bool) -> list[dict]:
    """The cells that stand for one exported cell."""
    if not shown:
        found = [node for node, _ in segments(text) if node is not None]
        said = [
            described(node, full_name(node), text, sources.get(full_name(node), ""))
            for node in found
        ]
        folded = code(text, '#| code-fold: true\n#| code-summary: "Code"\n')
        return [*(map(markdown, said)), folded]
    cells = []
    for node, part in segments(text):
        if node is not None:
            name = full_name(node)
            cells.append(markdown(opened(node, name, sources.get(name, ""))))
        cells.append(code(part))
    return cells


# ---- one page


def without_directives(text: str) -> str:
    """Code without the lines for Quarto that open it."""
    return re.sub(r"\A(\s*#\|.*\n?)+", "", text)


def directive(text: str, name: str) -> bool:
    """Whether the lines that open a cell say something about `name`."""
    return bool(re.search(rf"^#\|\s*{name}\b", text, flags=re.MULTILINE))


def one_line(option: re.Match) -> str:
    """A caption or alternative text as one quoted line."""
    name, first, more = option.groups()
    lines = [first, *(line.removeprefix("#|") for line in more.splitlines())]
    said = " ".join(line.strip() for line in lines).strip()
    if said[:1] in "\"'":
        said = yaml.safe_load(said)
    return f"#| {name}: {json.dumps(said, ensure_ascii=False)}\n"


def whole_options(text: str, written: str) -> str:
    """A cell with the captions and alternative texts that were written for it. nbdev takes each
    line of them for an option of its own, and Quarto does not read a colon in one without quotes.
    """
    option = r"^#\| ?((?:fig|tbl)-(?:cap|alt)): *(?:>-)?(.*)\n?((?:#\| {2,}\S.*\n?)*)"
    opening = re.match(r"(#\|.*\n?)*", written)[0]
    if not re.search(option, opening, flags=re.MULTILINE):
        return text
    mended = re.sub(option, one_line, opening, flags=re.MULTILINE)
    mended = re.sub(r"^#\| ?([\w-]+) *$", r"#| \1: true", mended, flags=re.MULTILINE)
    return mended + without_directives(text)


def body_of(text: str) -> list[ast.stmt]:
    """A cell's statements; none of one that is no Python, such as a shell command."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def only_imports(text: str) -> bool:
    """Whether a cell does nothing but import."""
    body = body_of(text)
    return bool(body) and all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in body)


def defined(text: str) -> list[str]:
    """The functions and classes that a cell defines."""
    return [node.name for node in body_of(text) if isinstance(node, DEFINITIONS)]


def joined_links(text: str) -> str:
    """A link inside the text of another is its text alone."""
    inner, count = r"(\[[^\[\]]*(?<!!))\[([^\[\]]*)\]\([^()\s]*\)([^\[\]]*\]\([^()\s]+\))", 1
    while count:
        text, count = re.subn(inner, r"\1\2\3", text)
    return text


def plain_table(text: str) -> str:
    """A table of pandas without its own style, and with the names of its index in the row of the
    columns' names instead of one below."""
    text = re.sub(r"<style scoped>.*?</style>\s*", "", text, flags=re.DOTALL)
    head = re.search(r"<thead>\s*<tr[^>]*>(.*?)</tr>\s*<tr>(.*?)</tr>\s*</thead>", text, re.DOTALL)
    if not head or "span=" in head[0]:
        return text
    rows = [re.findall(r"<th[^>]*>(.*?)</th>", row, re.DOTALL) for row in head.groups()]
    if len(rows[0]) != len(rows[1]) or any(a and b for a, b in zip(*rows)):
        return text
    merged = "".join(f"<th>{a or b}</th>" for a, b in zip(*rows))
    return text.replace(head[0], f"<thead><tr>{merged}</tr></thead>")


def with_text_columns(text: str) -> str:
    """A table of pandas whose columns of words have the class `text`, and those with sentences or
    digests `text long`. Columns are counted from the right, since an index may span rows."""
    if not re.search(r'<table[^>]*class="dataframe', text):
        return text
    word = re.compile(r"\s*(?!nan\b|none\b)[^\W\d]", re.IGNORECASE)
    kinds = {}
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text.partition("</thead>")[2], re.DOTALL):
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)[::-1]
        for number, cell in enumerate(cells):
            if len(cell) > 40:
                kinds[number] = "text long"
            elif word.match(cell):
                kinds.setdefault(number, "text")

    def marked(row: re.Match) -> str:
        parts = re.split(r"(?=<t[dh][ >])", row[0])
        for number, place in enumerate(range(len(parts) - 1, 0, -1)):
            if number in kinds:
                parts[place] = f'{parts[place][:3]} class="{kinds[number]}"{parts[place][3:]}'
        return "".join(parts)

    return re.sub(r"<tr[ >].*?</tr>", marked, text, flags=re.DOTALL)


def sources_of(cells: list[dict]) -> dict[str, str]:
    """Name -> where its source is seen, from the entries that nbdev made."""
    found = {}
    for cell in cells:
        if name := re.search(r"^show_doc\((.+?)\)", text_of(cell), flags=re.MULTILINE):
            for output in cell.get("outputs", []):
                said = "".join(output.get("data", {}).get("text/markdown", ""))
                if link := re.search(SOURCE, said):
                    found[name[1]] = link[1]
    return found


def text_of(cell: dict) -> str:
    """A cell's source."""
    return "".join(cell["source"])


def is_entry(cell: dict) -> bool:
    """Whether nbdev made a cell to show a definition."""
    return cell["cell_type"] == "code" and bool(
        re.search(r"^show_doc\(", text_of(cell), flags=re.MULTILINE)
    )


def table(text: str) -> str:
    """A table of pandas as the site shows it."""
    return re.sub(r">NaN</td>", ">–</td>", with_text_columns(plain_table(text)))


MENDED = ("text/markdown", joined_links), ("text/html", table)  # outputs, by kind


def with_summary(text: str, parameters: bool = False) -> str:
    """A cell that says what it is when it is folded; imports always are."""
    code = without_directives(text)
    if only_imports(code) and not directive(text, "code-fold") and not directive(text, "echo"):
        text = f"#| code-fold: true\n{text}"
    if directive(text, "code-summary"):
        return text
    summary = "Parameters" if parameters else "Imports" if only_imports(code) else "Code"
    if names := defined(code):
        summary += ": " + ", ".join(names)
    return f'#| code-summary: "{summary}"\n{text}' if summary != "Code" else text


def finished(notebook: dict, room: str, written: dict[str, str]) -> None:
    """Make a processed notebook's cells what a reader is to see; `written` has the cells of the
    notebook that it was made from, by their ids."""
    sources, cells = sources_of(notebook["cells"]), []
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)  # Quarto would make attributes of it
        text = text_of(cell)
        if is_entry(cell):
            continue
        if cell["cell_type"] == "code":
            text = cell["source"] = whole_options(text, written.get(cell.get("id"), ""))
        if cell["cell_type"] == "code" and directive(text, "exports"):
            cells += entries(without_directives(text), sources, room in OPEN)
            continue
        if cell["cell_type"] == "code":
            cell["source"] = with_summary(text, "parameters" in cell["metadata"].get("tags", []))
        if cell["cell_type"] == "markdown":
            cell["source"] = joined_links(text)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for kind, mended in MENDED:
                if kind in data:
                    data[kind] = mended("".join(data[kind]))
        cells.append(cell)
    notebook["cells"] = cells


def name_headings(notebook: dict) -> None:
    """Headings that would have the anchor of a definition on their page get one of their own."""
    texts = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    given = set(re.findall(r"^#+ .*\{#([^ }]+)", "\n".join(map(text_of, texts)), re.MULTILINE))

    def named(line: re.Match) -> str:
        anchor = slug(line[1])
        return f"{line[0]} {{#on-{anchor}}}" if anchor in given else line[0]

    for cell in texts:
        parts = re.split(r"(^```.*?^```)", text_of(cell), flags=re.DOTALL | re.MULTILINE)
        parts[::2] = [
            re.sub(r"^#{1,6} +(.*[^\s}])$", named, part, flags=re.MULTILINE) for part in parts[::2]
        ]
        cell["source"] = "".join(parts)


# ---- words of the glossary


# words that nobody would look up
EVERYDAY = set("public private domain client server settings form context merge".split())


def glossary() -> dict[str, str]:
    """Term -> anchor, from the headings of the glossary."""
    path = PROCESSED / "glossary.ipynb"
    text = "\n".join(map(text_of, json.loads(path.read_text(encoding="utf-8"))["cells"]))
    found = re.findall(r"^###\s+(.+?)\s*\{#([\w-]+)\}\s*$", text, flags=re.MULTILINE)
    words = {term: anchor for term, anchor in found if re.fullmatch(r"[A-Za-z -]+", term)}
    return {term: anchor for term, anchor in words.items() if term.lower() not in EVERYDAY}


PROSE = re.compile(  # what is no prose: code, formulas, links, tables, headings, HTML, divs
    r"(^```.*?^```|^~~~.*?^~~~|`[^`\n]+`|\$\$.+?\$\$|\$[^$\n]+\$|!?\[[^\]]*\](?:\([^)]*\))?"
    r"(?:\{[^}]*\})?|^[|#>:].*?$|<[^>]+>|^ {4}.*?$|\{[^}\n]*\})",
    flags=re.DOTALL | re.MULTILINE,
)


def with_terms(text: str, terms: dict[str, str], page: str) -> str:
    """Prose in which the first use of each term leads to the glossary; `terms` loses those that
    were found."""
    parts = PROSE.split(text)
    for index in range(0, len(parts), 2):
        for term in sorted(terms, key=len, reverse=True):
            stem, ending = (term[:-3], "(?:y|ies)") if term.endswith("ies") else (term, "s?")
            pattern = rf"(?<![\w\[/-])({re.escape(stem)}{ending})(?![\w\]-])"
            parts[index], hits = re.subn(
                pattern, rf"[\1]({page}#{terms[term]}){{.term}}", parts[index], 1, re.IGNORECASE
            )
            if hits:
                del terms[term]
                break  # a second term in the same stretch could fall into this link
    return "".join(parts)


def link_terms(notebook: dict, terms: dict[str, str], relative: Path) -> None:
    """The words of the glossary in the text of a page."""
    left, page = dict(terms), "../" * len(relative.parent.parts) + "glossary.ipynb"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and not text_of(cell).startswith(":::"):
            cell["source"] = with_terms(text_of(cell), left, page)


# ---- all names


def first_sentence(text: str) -> str:
    """A docstring up to its first full stop."""
    flat = " ".join(text.split())
    return re.split(r"(?<=[.!?])\s", flat, maxsplit=1)[0]


def names_by_room() -> list[dict]:
    """Every public name of the package by room: a link, and its first sentence."""
    index = import_module("harmomoe._modidx").d["syms"]
    rooms = {}
    for module in sorted(index):
        path = ROOT / (module.replace(".", "/") + ".py")
        said = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, DEFINITIONS):
                said[full_name(node)] = docstring(node)
                for method in methods(node) if isinstance(node, ast.ClassDef) else []:
                    said[f"{node.name}.{method.name}"] = docstring(method)
        for full, (link, _) in sorted(index[module].items()):
            name = full[len(module) + 1 :]
            if name in said and all(map(public, name.split("."))):
                room = module.split(".")[1]
                page, _, anchor = link.partition("#")
                sentence = cell_text(first_sentence(said[name]))
                rooms.setdefault(room, []).append(f"| [`{name}`]({page}#{anchor}) | {sentence} |")
    head = "| name | |\n|:---|:-------|\n"
    return [markdown(f"## {room}\n\n{head}" + "\n".join(rows)) for room, rows in rooms.items()]


def write(path: Path, notebook: dict) -> None:
    """Write a notebook with the ids that its format wants, and texts as lists of lines: Quarto
    loses the ends of lines of any other."""
    for number, cell in enumerate(notebook["cells"]):
        cell["id"] = f"{number:08x}"
        cell["source"] = text_of(cell).splitlines(keepends=True)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for kind in [kind for kind in data if kind.startswith("text/")]:
                data[kind] = "".join(data[kind]).splitlines(keepends=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- a page as Markdown


def as_markdown(notebook: dict) -> str:
    """A finished page for readers without a browser: text, code, and what came out as text."""
    parts = []
    for cell in notebook["cells"]:
        text = text_of(cell)
        if cell["cell_type"] != "code":
            parts.append(text)
            continue
        if "#| echo: false" not in text:
            parts.append(fenced(without_directives(text)))
        for output in cell["outputs"]:
            data = output.get("data", {})
            plain = "".join(output.get("text", data.get("text/plain", "")))
            shown = "".join(data.get("text/markdown", "")) or (plain and f"```\n{plain}\n```")
            parts.append(shown)
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def write_twins(folder: Path) -> None:
    """The Markdown of every page that was rendered."""
    for path in sorted(PROCESSED.rglob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        front = yaml.safe_load(text_of(notebook["cells"][0]).strip().strip("-")) or {}
        relative = path.relative_to(PROCESSED).with_suffix(".html")
        page = folder / relative.with_name(front.get("output-file", relative.name))
        if page.is_file():
            page.with_name(page.name + ".md").write_text(as_markdown(notebook), encoding="utf-8")


def finish() -> None:
    """Finish every page once."""
    terms, lookup = glossary(), NbdevLookup()
    for path in sorted(PROCESSED.rglob("*.ipynb")):
        relative = path.relative_to(PROCESSED)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        if notebook["metadata"].get("finished"):
            continue
        original = json.loads((NOTEBOOKS / relative).read_text(encoding="utf-8"))["cells"]
        written = {cell.get("id"): text_of(cell) for cell in original}
        finished(notebook, relative.parts[0], written)
        name_headings(notebook)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = joined_links(lookup.linkify(text_of(cell)))
        if relative.name != "glossary.ipynb":
            link_terms(notebook, terms, relative)
        notebook["metadata"]["finished"] = True
        write(path, notebook)
    path = PROCESSED / "names.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    top = [cell for cell in notebook["cells"] if not text_of(cell).startswith("## ")]
    write(path, notebook | dict(cells=[*top, *names_by_room()]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--twins"]:
        write_twins(Path(sys.argv[2]))
    else:
        finish()
