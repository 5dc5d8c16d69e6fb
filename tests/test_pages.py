"""What the pages of the site owe a reader, as far as it can be seen without rendering them."""

import ast
import json
import re
from pathlib import Path

import check_links
import finish_pages
import pandas
import pytest
import yaml
from finish_pages import DEFINITIONS, directive, public, text_of

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(
    path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
MODULES = sorted(path for path in (ROOT / "harmomoe").rglob("*.py") if path.name[0] != "_")


def identifier(path):
    return "/".join(path.with_suffix("").parts[-2:])


def cells(path, kind="code"):
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def pictures(cell):
    kinds = {kind for output in cell["outputs"] for kind in output.get("data", {})}
    return any(kind.startswith("image/") for kind in kinds)


every_page = pytest.mark.parametrize("path", NOTEBOOKS, ids=identifier)


@every_page
def test_pictures_have_alternative_text(path):
    without = [text_of(cell) for cell in cells(path) if pictures(cell)]
    assert [text[:80] for text in without if not directive(text, "fig-alt")] == []
    drawn = re.findall(r"!\[([^\]]*)\]\(", "\n".join(map(text_of, cells(path, "markdown"))))
    assert all(drawn)


@every_page
def test_a_page_with_code_shows_what_came_out(path):
    said = [cell for cell in cells(path) if cell["outputs"]]
    assert said or not cells(path)


@every_page
def test_directives_are_said_once_and_stand_first(path):
    for cell in cells(path):
        text = text_of(cell)
        opening = re.match(r"(#\|.*\n?)*", text)[0]
        names = re.findall(r"^#\|\s*([\w-]+):", opening, flags=re.MULTILINE)
        assert len(names) == len(set(names)), text[:200]
        assert opening.count("#|") == len(re.findall(r"^#\|", text, flags=re.MULTILINE)), text


@every_page
def test_code_that_defines_something_for_users_is_shown(path):
    "`export` hides the source of a cell, `exports` shows it."
    for cell in cells(path):
        if re.match(r"#\|\s*export\s*$", text_of(cell), flags=re.MULTILINE):
            body = ast.parse(text_of(cell)).body
            assert all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_every_field_of_a_public_class_is_explained(path):
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and public(node.name):
            for name, _, _, said in finish_pages.fields(node, text):
                assert said, f"{node.name}.{name} has no comment"


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_every_public_name_says_what_it_is(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, DEFINITIONS) and public(node.name):
            inside = finish_pages.methods(node) if isinstance(node, ast.ClassDef) else []
            assert all(map(finish_pages.docstring, [node, *inside])), node.name


def test_footer_says_which_version_it_is():
    import harmomoe

    website = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    assert f"harmomoe {harmomoe.__version__} " in website["page-footer"]["left"]


def test_pictures_of_the_site_itself_are_there():
    website = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    for name in ("favicon", "image"):
        assert (ROOT / "nbs" / website[name]).read_bytes()[:4] == b"\x89PNG"


def test_no_markdown_twin_is_asked_of_quarto():
    "Before 1.10.15 it deletes those of notebooks without a number and then stops."
    written = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["format"]
    assert list(written) == ["html"]


# ---- the tool that finishes pages

EXPORTED = """#| exports
# how much
@dataclass
class Amount:
    "An amount. Of things."

    number: int = 1  # of them
    # what they
    # are
    what: str | None = None

    def double(
        self,
        times: int = 2,  # how often
    ) -> int:
        "Twice as many."
        return self.number * times


def _hidden(): ...


@patch
def halve(self: Amount) -> int:
    "Half of it."
    return self.number // 2
"""


def finished(source, room):
    exported = dict(cell_type="code", metadata={"execution": {}}, source=source, outputs=[])
    notebook = dict(cells=[exported], metadata={})
    finish_pages.finished(notebook, room, {})
    return notebook["cells"]


def test_code_of_the_method_stands_open_below_each_name():
    found = finished(EXPORTED, "moe")
    assert [cell["cell_type"] for cell in found] == ["markdown", "code"] * 2
    first, code, second, patched = map(text_of, found)
    assert first.startswith("### Amount {#amount}") and "[]{#amount.double}" in first
    assert code.startswith("# how much\n@dataclass") and "_hidden" in code
    assert second == "### Amount.halve {#amount.halve}" and patched.startswith("@patch")


def test_other_code_is_folded_below_fields_methods_and_signatures():
    entry, patched, code = finished(EXPORTED, "base")
    said = text_of(entry)
    assert "| `number` | `int` | `1` | of them |" in said
    assert "| `what` | <code>str &#124; None</code> | `None` | what they are |" in said
    assert "#### Amount.double {#amount.double}" in said and "times: int = 2,  # how often" in said
    assert "def halve(self: Amount) -> int:\n```" in text_of(patched)
    assert text_of(code).startswith("#| code-fold: true") and "return self" in text_of(code)


def test_folded_code_says_what_it_is():
    assert finish_pages.with_summary("import os") == (
        '#| code-summary: "Imports"\n#| code-fold: true\nimport os'
    )
    code = "def f(): ...\nclass A: ..."
    assert finish_pages.with_summary(code) == f'#| code-summary: "Code: f, A"\n{code}'
    assert finish_pages.with_summary("a = 1", True) == '#| code-summary: "Parameters"\na = 1'
    for same in ("f()", "!ls", '#| code-summary: "Words"\na = 1'):
        assert finish_pages.with_summary(same) == same


def test_links_in_links_are_joined_and_pictures_in_links_stay():
    text = "[see [`x`](a.html#x) there](b.ipynb), [[`y`](c)](d) and [![alt](e.png)](f)"
    joined = "[see `x` there](b.ipynb), [`y`](d) and [![alt](e.png)](f)"
    assert finish_pages.joined_links(text) == joined
    page = check_links.Page(Path("x"), Path("x"))
    page.add(text)
    assert len(page.nested) == 2
    page = check_links.Page(Path("x"), Path("x"))
    page.add(joined)
    assert page.nested == []


def test_tables_of_pandas_have_one_row_of_names():
    frame = pandas.DataFrame({"a": [1], "b": [2]}, pandas.Index(["x"], name="row"))
    found = finish_pages.plain_table(frame._repr_html_())
    assert "<thead><tr><th>row</th><th>a</th><th>b</th></tr></thead>" in found
    assert "<style" not in found and found.count("<tr>") == 2
    plain = frame.rename_axis(None)._repr_html_()
    assert finish_pages.plain_table(plain).count("<th></th>") == 1
    two = frame.set_index("a", append=True)._repr_html_()
    assert "<tr><th>row</th><th>a</th><th>b</th></tr>" in finish_pages.plain_table(two)


def test_terms_are_linked_once_and_only_in_prose():
    terms = {"Proxy": "proxy", "Bundle": "bundle"}
    text = "# A bundle\n\n`bundle` and [bundle](x), $bundle$. Bundles hold a bundle; a proxy-like."
    said = finish_pages.with_terms(text, terms, "../glossary.ipynb")
    assert said == text.replace("Bundles", "[Bundles](../glossary.ipynb#bundle){.term}")
    assert terms == {"Proxy": "proxy"}


def test_headings_leave_their_anchor_to_a_definition():
    texts = ["## Claim\n\n```\n# claim\n```\n\n## Other", "### claim {#claim}"]
    notebook = dict(cells=[finish_pages.markdown(text) for text in texts])
    finish_pages.name_headings(notebook)
    first, second = map(text_of, notebook["cells"])
    assert first == texts[0].replace("## Claim", "## Claim {#on-claim}") and second == texts[1]


def test_columns_of_words_are_read_from_the_left():
    frame = pandas.DataFrame({"n": [1, 2], "why": ["no", "w" * 41], "x": ["nan", 3]}, ["a", "b"])
    lines = finish_pages.with_text_columns(frame.to_html()).splitlines()
    found = [line.strip() for line in lines if "<t" in line and "class" in line]
    kinds = [line.partition(">")[0] for line in found[1:]]
    row = ['<th class="text"', '<td class="text long"']
    assert kinds == ['<th class="text"', '<th class="text long"', *row, *row]
    assert finish_pages.with_text_columns("<table><tr><td>a</td></tr></table>")[:10] == "<table><tr"


def test_captions_that_nbdev_cut_apart_are_whole_again():
    said = "#| fig-cap: >-\n#|   One: a line.\n#|   Its end.\n#| fig-alt: 'An: x'\nplot()\n"
    cut = "#| echo: false\n#| fig-cap: >-\n#| One: a line.\n#| Its: end.\nplot()\n"
    mended = finish_pages.whole_options(cut, "#| echo: false\n#| exports\n" + said)
    lines = ["#| echo: false", "#| exports: true", '#| fig-cap: "One: a line. Its end."']
    assert mended.splitlines() == [*lines, '#| fig-alt: "An: x"', "plot()"]
    assert finish_pages.whole_options("#| echo: false\nplot()", "") == "#| echo: false\nplot()"
    open_value = finish_pages.whole_options("x", "#| fig-cap: Less. Blue: more.\nx")
    assert yaml.safe_load(open_value[2:].splitlines()[0]) == {"fig-cap": "Less. Blue: more."}


def test_finished_pages_are_lists_of_lines(tmp_path):
    shown = dict(output_type="display_data", data={"text/html": "<b>\n</b>"}, metadata={})
    cells = [finish_pages.markdown("a\nb"), finish_pages.code("1\n2") | dict(outputs=[shown])]
    finish_pages.write(tmp_path / "x.ipynb", dict(cells=cells, metadata={}))
    text, code = json.loads((tmp_path / "x.ipynb").read_text())["cells"]
    assert text["source"] == ["a\n", "b"] and code["source"] == ["1\n", "2"]
    assert code["outputs"][0]["data"]["text/html"] == ["<b>\n", "</b>"]


def test_names_are_listed_with_their_first_sentence():
    listed = "\n".join(text_of(cell) for cell in finish_pages.names_by_room())
    line = "| [`digest`](base/artefacts.html#digest) | SHA-256 of the canonical JSON of `value`. |"
    assert line in listed.splitlines()
    assert "[`Config`](config/settings.html#config)" in listed and "__post_init__" not in listed


def test_twins_hold_text_code_and_what_came_out(tmp_path, monkeypatch):
    top = dict(cell_type="raw", metadata={}, source="---\noutput-file: x.html\n---\n")
    shown = dict(output_type="stream", name="stdout", text=["2\n"])
    code = dict(cell_type="code", metadata={}, source="#| fig-alt: z\n1 + 1", outputs=[shown])
    (tmp_path / "00_x.ipynb").write_text(json.dumps(dict(cells=[top, code], metadata={})))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "x.html").touch()
    monkeypatch.setattr(finish_pages, "PROCESSED", tmp_path)
    finish_pages.write_twins(tmp_path / "site")
    twin = (tmp_path / "site" / "x.html.md").read_text()
    assert twin.endswith("```python\n1 + 1\n```\n\n```\n2\n\n```\n") and "fig-alt" not in twin
