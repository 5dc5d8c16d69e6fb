"""Make the pictures of the landing page and the gallery: `python tools/make_pictures.py`.

result.png and social.png show samples of the embedded benchmark and the accuracies of the table in
nbs/index.ipynb; the gallery's pictures are taken from the outputs that the notebooks hold.
"""

import base64
import io
import json
import re

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from make_readme import INDEX, ROOT
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image, ImageDraw

from harmomoe.data.glyphs import load_glyphs

IMAGES = ROOT / "nbs" / "images"
SENTENCE = "Unify domain experts into one Mixture-of-Experts model\nwithout sharing private data"
COLOURS = {"flags": "#56B4E9", "digits": "#009E73", "letters": "#E69F00"}
OURS, INK = "#0072B2", "#222222"
# file -> notebook, words of the cell that shows the picture, which of its pictures
GALLERY = {
    "pool": ("data/05_glyphs", "show(some(glyphs.pool.train", 0),
    "relevance": ("describe/01_relevance", "relevance_figure(relevance", 0),
    "diversity": ("describe/02_dpp", "rng = np.random.default_rng(4)", 0),
    "proxies": ("run_cv", "tsne_figure(private[first]", 0),
    "means": ("describe/04_routing", "pool = benchmark.pool.train.select", 0),
    "routing": ("run_cv", "routing_figure({name: observe_routing(unified", 0),
    "accuracy": ("run_cv", "accuracy_figure(titled", 0),
    "speed": ("experiments/speed", "def points(name, kind)", 0),
}


def accuracies() -> dict[str, float]:
    """The averages of the landing page's table, in percent."""
    text = INDEX.read_text(encoding="utf-8").replace("*", "")
    rows = re.findall(r"\| ([\w ,-]+?) \|(?: [\d.]+ \|){3} ([\d.]+) \|", text)
    return {name: float(percent) for name, percent in rows}


def strip(rows, count: int, random_state: int = 5) -> np.ndarray:
    """So many random images side by side, with white gaps."""
    chosen = np.random.default_rng(random_state).permutation(len(rows))[:count]
    gap = np.full((48, 5, 3), 255, np.uint8)
    tiles = [np.asarray(rows[int(i)]["image"].convert("RGB")) for i in chosen]
    return np.concatenate([part for tile in tiles for part in (tile, gap)][:-1], axis=1)


def box(axis, x, y, width, height, face, edge) -> None:
    """A box with round corners."""
    shape = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=6")
    shape.set(facecolor=face, edgecolor=edge, linewidth=1.6)
    axis.add_patch(shape)


def arrow(axis, start, end, colour, width) -> None:
    """An arrow from point to point."""
    style = dict(arrowstyle="-|>", mutation_scale=14, linewidth=width, color=colour)
    axis.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def draw_clients(axis, clients) -> None:
    """What goes in: three clients with their images, and what each sends."""
    axis.text(5, 287, "Three owners, each with private images", weight="bold")
    for k, client in enumerate(clients):
        y, colour = 190 - 88 * k, COLOURS[client.name]
        box(axis, 5, y, 268, 80, "white", colour)
        axis.text(15, y + 61, f"{client.name}: {len(client.train):,} images stay here", size=9.5)
        picture = strip(client.train, 5)
        axis.imshow(picture, extent=(15, 263, y + 8, y + 8 + 248 * 48 / picture.shape[1]), zorder=3)
        arrow(axis, (273, y + 40), (372, 142 + 22 * (1 - k)), colour, 2.2)
        axis.text(280, y + (52, 46, 18)[k], "bundle", color=INK, size=9)


def draw_model(axis) -> None:
    """What comes out: one model."""
    box(axis, 374, 82, 122, 122, "#eaf3fa", OURS)
    axis.text(435, 180, "one model", ha="center", weight="bold")
    for k, (name, colour) in enumerate(COLOURS.items()):
        box(axis, 384, 146 - 27 * k, 102, 21, colour, colour)
        dark = "white" if name == "digits" else INK
        axis.text(435, 152 - 27 * k, f"expert: {name}", ha="center", size=9, color=dark)
    axis.text(435, 70, "a router chooses\nthe expert", ha="center", va="top", size=9)
    arrow(axis, (496, 142), (524, 142), "#444444", 2.2)


def draw_bars(axis, found) -> None:
    """What it is worth: test accuracies."""
    axis.text(560, 287, "Test accuracy over all three, %", weight="bold")
    shown = {
        "seed, zero-shot": "seed alone",
        "best single expert": "best single expert",
        "HarmoMoE": "HarmoMoE: one model",
        "matching experts": "every image's own expert\n(if somebody told which)",
    }
    for k, (name, label) in enumerate(shown.items()):
        y, ours = 222 - 62 * k, name == "HarmoMoE"
        box(axis, 740, y, 1.8 * found[name], 36, OURS if ours else "#c9ced3", "none")
        weight = "bold" if ours else "normal"
        at = dict(va="center", weight=weight)
        axis.text(732, y + 18, label, ha="right", size=10, **at)
        axis.text(747 + 1.8 * found[name], y + 18, f"{found[name]:.1f}", size=12, **at)


def draw_result(axis) -> None:
    """The whole story on an axis of 960 x 310 units."""
    axis.set(xlim=(0, 960), ylim=(0, 310), aspect="equal")
    axis.axis("off")
    draw_clients(axis, load_glyphs().clients)
    draw_model(axis)
    draw_bars(axis, accuracies())
    axis.set(xlim=(0, 960), ylim=(0, 310))


def save(figure, name: str, colours: int) -> None:
    """A figure as a PNG of so many colours."""
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor="white")
    plt.close(figure)
    picture = Image.open(file).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    picture.save(IMAGES / name, optimize=True)


def make_result() -> None:
    """result.png: what went in and what came out."""
    figure = plt.figure(figsize=(9.6, 3.1), dpi=150)
    draw_result(figure.add_axes((0, 0, 1, 1)))
    save(figure, "result.png", 96)


def make_social() -> None:
    """social.png: the same under the project's name, 1200 x 630."""
    figure = plt.figure(figsize=(12, 6.3), dpi=100)
    figure.text(0.05, 0.86, "harmomoe", size=40, weight="bold", color=OURS)
    figure.text(0.05, 0.80, SENTENCE, size=19, va="top", linespacing=1.4)
    axis = figure.add_axes((0.04, 0.03, 0.92, 0.58))
    with plt.rc_context({"font.size": 10}):
        draw_result(axis)
    save(figure, "social.png", 200)


def make_favicon() -> None:
    """favicon.png: three experts and the one model around them, 64 x 64."""
    large = Image.new("RGBA", (512, 512))
    pen = ImageDraw.Draw(large)
    pen.rounded_rectangle((16, 16, 496, 496), 110, fill=OURS)
    for (x, y), colour in zip([(256, 152), (152, 340), (360, 340)], COLOURS.values()):
        pen.line((256, 262, x, y), fill="white", width=34)
        pen.ellipse((x - 82, y - 82, x + 82, y + 82), fill=colour, outline="white", width=26)
    large.resize((64, 64), Image.Resampling.LANCZOS).save(IMAGES / "favicon.png", optimize=True)


def make_gallery() -> None:
    """gallery/NAME.png or .jpg: pictures as the notebooks hold them."""
    folder = IMAGES / "gallery"
    folder.mkdir(exist_ok=True)
    for name, (notebook, words, number) in GALLERY.items():
        path = ROOT / "nbs" / f"{notebook}.ipynb"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        [cell] = [c for c in cells if words in "".join(c["source"]) and c.get("outputs")]
        data = [output.get("data", {}) for output in cell["outputs"]]
        kinds = {"image/png": "png", "image/jpeg": "jpg"}
        found = [(kinds[kind], d[kind]) for d in data for kind in kinds if kind in d]
        suffix, encoded = found[number]
        (folder / f"{name}.{suffix}").write_bytes(base64.b64decode("".join(encoded)))


if __name__ == "__main__":
    make_result()
    make_social()
    make_favicon()
    make_gallery()
