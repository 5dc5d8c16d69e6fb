"""README is read where there is nothing beside it: on GitHub's front page and on a package index.
Pictures of the site, small and described."""

import re

import make_pictures
import make_readme
import mistune
import pytest
from make_readme import ROOT, plain
from PIL import Image

README = make_readme.readme()
TARGETS = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", README, flags=re.S))
IMAGES = ROOT / "nbs" / "images"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_address_is_whole():
    assert [target for target in TARGETS if not re.match(r"https?://", target)] == []


def test_addresses_of_the_repository_are_files_and_headings():
    headings = {slug(title) for title in re.findall(r"^#+ (.+)$", README, flags=re.M)}
    anchor, files = (
        make_readme.git_url() + "#",
        (make_readme.repository_url(), make_readme.raw_url()),
    )
    ours = [target for target in TARGETS if target.startswith(make_readme.git_url())]
    assert len(ours) > 20
    for target in TARGETS:
        if target.startswith(anchor):
            assert target.removeprefix(anchor) in headings, target
        elif base := next((base for base in files if target.startswith(base)), None):
            assert (ROOT / target.removeprefix(base).partition("#")[0]).is_file(), target


def test_pictures_are_fetched_as_they_are_and_described():
    pictures = re.findall(r"!\[([^\]]*)\]\(([^()\s]+)\)", README)
    assert len(pictures) == 2
    for description, target in pictures:
        assert len(description) > 40 and target.startswith(make_readme.raw_url())


def test_readme_has_only_what_every_reader_shows():
    """A package index knows neither Quarto's divs and attributes nor formulas."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", README, flags=re.S)
    assert not re.search(r"^:::|\$|\]\([^)]*\)\{|<(?!!--)\w", prose, flags=re.M)
    html = mistune.create_markdown(plugins=["table"])(README)
    assert ":::" not in html and html.count("<table>") == 3 and html.count("<img") == 2


@pytest.mark.parametrize(
    "markdown, wanted",
    [
        ("::: {.card}\n[a](data/x.ipynb#b)\n:::", "[a](BLOB/nbs/data/x.ipynb#b)\n"),
        ("![a](images/x.png){width=9}", "![a](RAW/nbs/images/x.png)"),
        ('![a](x.svg){fig-alt="b, c"}', "![b, c](RAW/nbs/x.svg)"),
        ("[![a](images/x.png)](x.ipynb)", "[![a](RAW/nbs/images/x.png)](BLOB/nbs/x.ipynb)"),
        ("[a](#b) [c](https://d.org/#e)", "[a](GIT#b) [c](https://d.org/#e)"),
        ("[a](../LICENSE)\n## B {#b .c}", "[a](BLOB/LICENSE)\n## B"),
        ("```\n::: [a](b) {#c}\n```", "```\n::: [a](b) {#c}\n```"),
    ],
)
def test_plain_markdown(markdown, wanted):
    raw, blob = make_readme.raw_url(), make_readme.repository_url()
    wanted = (
        wanted.replace("RAW/", raw).replace("BLOB/", blob).replace("GIT", make_readme.git_url())
    )
    assert plain(markdown) == wanted


def test_pictures_show_the_numbers_of_the_table():
    found = make_pictures.accuracies()
    assert list(found) == ["seed, zero-shot", "best single expert", "HarmoMoE", "matching experts"]
    assert all(
        f"| {'**' * (name == 'HarmoMoE')}{percent}" in README for name, percent in found.items()
    )
    for name in ("seed, zero-shot", "best single expert", "HarmoMoE"):
        assert f"{found[name]}" in re.findall(r"!\[([^\]]*)\]", README)[0]


@pytest.mark.parametrize(
    "name, size, most",
    [("social.png", (1200, 630), 200_000), ("favicon.png", (64, 64), 10_000)],
)
def test_pictures_of_the_site_have_their_size(name, size, most):
    with Image.open(IMAGES / name) as picture:
        assert picture.size == size
    assert (IMAGES / name).stat().st_size < most


def test_pictures_of_pages_are_small():
    others = [path for path in IMAGES.rglob("*") if path.is_file() and path.name != "social.png"]
    assert {path.name: path.stat().st_size for path in others if path.stat().st_size > 60_000} == {}
    assert len(list((IMAGES / "gallery").iterdir())) == len(make_pictures.GALLERY) <= 8
