"""A seed and a benchmark so small that the whole method runs on them in seconds.

The fixtures import what they need themselves, so that a test file that uses none of them starts at
once."""

import io
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has one core

HUES = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 50, 190),
    "cyan": (40, 200, 210),
}
# domain -> (pattern, hues, images of train, val and test)
DOMAINS = {
    "pool": ("disc", tuple(HUES), (90, 12, 12)),
    "a": ("stripes", ("red", "green", "blue"), (30, 6, 12)),
    "b": ("checks", ("yellow", "purple"), (24, 4, 8)),
    "c": ("cross", ("red", "yellow", "cyan", "purple"), (32, 8, 12)),
}


def _picture(pattern, colour, rng):
    "One 16 x 16 picture of a coloured pattern, at a random place, with noise."
    import numpy as np
    from PIL import Image

    y, x = np.mgrid[:16, :16] + rng.integers(0, 4, 2)[:, None, None]
    on = dict(
        disc=(x - 9) ** 2 + (y - 9) ** 2 < 30,
        stripes=x % 4 < 2,
        checks=(x // 3 + y // 3) % 2 == 0,
        cross=(abs(x - 9) < 3) | (abs(y - 9) < 3),
    )[pattern]
    pixels = np.where(on[..., None], colour, 110) + rng.normal(0, 25, (16, 16, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _png(image):
    image.save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Parquet files as `load_benchmark` reads them: pool `pool`, clients `a`, `b`, `c`; class
    names with underscores."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, (pattern, hues, sizes) in DOMAINS.items():
        for split, size in zip(("train", "val", "test"), sizes):
            labels = [i % len(hues) for i in range(size)]
            rows = [
                dict(
                    image=dict(bytes=_png(_picture(pattern, HUES[hues[i]], rng)), path=None),
                    label=i,
                    class_name=f"{hues[i]}_{pattern}",
                )
                for i in labels
            ]
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}_{split}.parquet")
    return folder


@pytest.fixture(scope="session")
def tiny_benchmark(tiny_folder):
    "The same as a `Benchmark` in memory."
    from harmomoe.data.domains import load_benchmark

    return load_benchmark(tiny_folder, "a,b,c", "pool")


@pytest.fixture(scope="session")
def tiny_config():
    "open_clip's `model_cfg` of the tiny seed."
    return dict(
        embed_dim=32,
        vision_cfg=dict(image_size=16, layers=2, width=64, patch_size=8),
        text_cfg=dict(context_length=12, vocab_size=512 + 100 + 2, width=64, heads=1, layers=2),
    )


@pytest.fixture(scope="session")
def tiny_vocabulary(tmp_path_factory):
    "The first 100 byte-pair merges of CLIP's tokenizer."
    import gzip

    from open_clip.tokenizer import default_bpe

    path = tmp_path_factory.mktemp("vocabulary") / "bpe.txt.gz"
    with gzip.open(default_bpe(), "rt", encoding="utf-8") as lines:
        text = "".join(line for line, _ in zip(lines, range(101)))  # a heading, and the merges
    path.write_bytes(gzip.compress(text.rstrip("\n").encode(), mtime=0))
    return path


def pytest_collection_modifyitems(items):
    "Notebooks first, which take longest: a process that is done early takes over what is left."
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


@pytest.fixture
def no_figures():
    "Closes what a test has drawn."
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    "Notebooks run in an empty folder, and leave no figures open."
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


@pytest.fixture(scope="session")
def tiny_seed(tiny_config, tiny_vocabulary):
    "A randomly initialised ImageSeed. Tests don't change it."
    import open_clip
    import torch
    from open_clip.tokenizer import SimpleTokenizer

    from harmomoe.base.process import seeded
    from harmomoe.models.clip import ImageSeed

    torch.set_num_threads(1)  # a second thread only slows so small a model down
    with seeded(0):
        clip = open_clip.CLIP(**tiny_config)
    clip.visual.preprocess_cfg = dict(
        size=(16, 16),
        mode="RGB",
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        interpolation="bilinear",
        resize_mode="shortest",
        fill_color=0,
    )
    tokenizer = SimpleTokenizer(str(tiny_vocabulary), context_length=12)
    return ImageSeed(
        clip, tokenizer, tiny_config, "tiny", "a picture of a {}", vocabulary=tiny_vocabulary
    )


@pytest.fixture(scope="session")
def tiny_seed_folder(tiny_seed, tmp_path_factory):
    "The tiny seed as `ImageSeed.save` writes it."
    folder = tmp_path_factory.mktemp("seeds") / "tiny"
    folder.mkdir()
    tiny_seed.save(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_settings():
    "A Config that takes a second for each client."
    from harmomoe.config.settings import (
        Config,
        ExpertSettings,
        FinetuneSettings,
        ProxySettings,
        RoutingSettings,
    )

    how = dict(epochs=2, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.0)
    return Config(
        proxies=ProxySettings(candidates=40, number=12),
        expert=ExpertSettings(rank=4, alpha=8, **how),
        routing=RoutingSettings(40),
        finetune=FinetuneSettings(**how),
    )


@pytest.fixture(scope="session")
def tiny_public(tiny_seed, tiny_benchmark, tiny_settings, tmp_path_factory):
    "What everybody has; tests with other settings call `tiny_public.with_config`."
    from harmomoe.describe.public import Public

    return Public(tiny_seed, tiny_benchmark.pool, tiny_settings, tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="session")
def tiny_clients(tiny_public, tiny_benchmark, tmp_path_factory):
    """Folder with the work of all three clients: `a`, `b` and `c`, each with its artefacts and
    `bundle`."""
    from harmomoe.client.client import Client

    folder = tmp_path_factory.mktemp("clients")
    for domain in tiny_benchmark.clients:
        Client(tiny_public, domain, folder / domain.name).bundle()
    return folder


@pytest.fixture(scope="session")
def tiny_bundles(tiny_clients, tiny_public):
    "What the three clients sent, read by the server."
    from harmomoe.bundle.files import read_bundle

    return [read_bundle(tiny_clients / name / "bundle", tiny_public) for name in "abc"]


def _bundles_of(name, form, forms=""):
    """A fixture: what the three clients send, of the same experts, when the routing vectors are
    to have this form, and others beside it."""

    @pytest.fixture(scope="session", name=f"tiny_{name}")
    def bundles(tiny_clients, tiny_public, tiny_benchmark, tmp_path_factory):
        import shutil

        from harmomoe.bundle.files import read_bundle
        from harmomoe.client.client import Client
        from harmomoe.config.settings import changed

        folder = shutil.copytree(tiny_clients, tmp_path_factory.mktemp(name) / "clients")
        changes = {"router.form": form, "routing.forms": forms}
        public = tiny_public.with_config(changed(tiny_public.config, changes))
        clients = [Client(public, d, folder / d.name) for d in tiny_benchmark.clients]
        return [read_bundle(client.bundle(), public) for client in clients]

    return bundles


tiny_logistic, tiny_moments, tiny_activation, tiny_evidence = (
    _bundles_of(form, form) for form in ("logistic", "moments", "activation", "evidence")
)
tiny_both = _bundles_of("both", "moments", "mean")
tiny_density = _bundles_of("density", "evidence", "density")


@pytest.fixture(scope="session")
def tiny(
    tiny_public,
    tiny_benchmark,
    tiny_clients,
    tiny_bundles,
    tiny_logistic,
    tiny_moments,
    tiny_activation,
    tiny_evidence,
    tiny_both,
):
    """All of the above in one: `tiny.seed`, `tiny.pool`, `tiny.a` and so on; `tiny.sent` has the
    bundles of each form, and `tiny.both` those that hold means and moments."""
    return SimpleNamespace(
        public=tiny_public,
        seed=tiny_public.seed,
        pool=tiny_public.pool,
        settings=tiny_public.config,
        embeddings=tiny_public.embeddings,
        clients=tiny_benchmark.clients,
        **{domain.name: domain for domain in tiny_benchmark.clients},
        work=tiny_clients,
        bundles=tiny_bundles,
        logistic=tiny_logistic,
        moments=tiny_moments,
        activation=tiny_activation,
        evidence=tiny_evidence,
        both=tiny_both,
        sent=dict(
            mean=tiny_bundles,
            logistic=tiny_logistic,
            moments=tiny_moments,
            activation=tiny_activation,
            evidence=tiny_evidence,
        ),
    )


@pytest.fixture
def client(tiny, tmp_path):
    """A function (changes, as for `changed`; train) that runs client a again, in a copy of its
    finished folder, `tmp_path / 'a'`, and returns its bundle."""
    import shutil
    from dataclasses import replace

    from harmomoe.client.client import Client
    from harmomoe.config.settings import changed

    shutil.copytree(tiny.work / "a", tmp_path / "a")

    def run(changes={}, train=None):
        domain = tiny.a if train is None else replace(tiny.a, train=train)
        public = tiny.public.with_config(changed(tiny.settings, changes))
        return Client(public, domain, tmp_path / "a").bundle()

    return run


@pytest.fixture(scope="session")
def merge_with(tiny):
    """A function (fields of `RouterSettings`) -> the three bundles of the form that the settings
    ask for, or `bundles`, in one model that is not fine-tuned."""
    from dataclasses import replace

    from harmomoe.moe.router import RouterSettings
    from harmomoe.server.merge import merge

    def build(bundles=None, random_state=0, **settings):
        settings = RouterSettings(**settings)
        if bundles is None:
            bundles = tiny.sent[settings.sent_form]
        public = tiny.public.with_config(replace(tiny.settings, random_state=random_state))
        return merge(bundles, public, settings)

    return build


@contextmanager
def _settings_kept():
    "What `faster_cpu` changes in here is changed back: other tests get the numbers of before."
    import torch

    precision = torch.get_float32_matmul_precision()
    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_flash_sdp(flash)


@pytest.fixture(autouse=True)
def torch_settings():
    "Every test gives torch's settings back: opening an experiment changes them."
    with _settings_kept() if "torch" in sys.modules else nullcontext():
        yield


@pytest.fixture(scope="session")
def run_cells():
    """A function (notebook, parameters) that runs a notebook's code cells here, as papermill
    would in a kernel.

    Papermill itself injects the parameters. Being in this process, a test can replace what the
    notebook calls; what `faster_cpu` changed there is changed back."""
    import matplotlib
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    def run(notebook: Path, parameters: dict) -> dict:
        matplotlib.use("agg")
        cells = parameterize_notebook(load_notebook_node(str(notebook)), parameters).cells
        space = {"__name__": "__main__", "In": [""]}
        with _settings_kept():
            for cell in cells:
                if cell.cell_type != "code":
                    continue
                space["In"].append(cell.source)
                exec(compile(cell.source, str(notebook), "exec"), space)
        return space

    return run


@pytest.fixture(scope="session")
def run_apart(run_cells, tmp_path_factory):
    """A function (notebook, parameters, out) that does so in an empty folder, for the tests of a
    file together: the path of `out`, and the names that the notebook has defined."""

    def run(notebook: Path, parameters: dict, out: str) -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp("apart")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return folder / out, run_cells(notebook, parameters | dict(out=out))

    return run


# ---- the same for text

COLOURS, ANIMALS = (
    "red blue green black white pink grey brown".split(),
    "dog cat cow hen pig fox owl bee".split(),
)


def _question(words, count, number, rng):
    """A question with `count` choices of which one is named in the question; the prompt's length
    varies."""
    right, place = rng.choice(words), rng.randrange(count)
    choices = rng.sample([word for word in words if word != right], count - 1)
    choices.insert(place, right)
    asked = " or ".join([f"number {number}"] * (1 + number % 3))
    return dict(question=f"Which word of {asked} is {right}?", choices=choices, answer=place)


@pytest.fixture(scope="session")
def tiny_texts(tmp_path_factory):
    """Files as `load_benchmark` reads them: pool `sayings` of 90 instructions, clients `colours`
    with 3 choices, in parquet, and `animals` with 4, in JSON lines. No two rows are alike."""
    import json
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    numbers = iter(range(1000))
    for split, size in (("train", 32), ("val", 9), ("test", 12)):
        rows = [_question(COLOURS, 3, next(numbers), rng) for _ in range(size)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"colours_{split}.parquet")
    for split, size in (("train", 24), ("dev", 8), ("test", 12)):
        rows = [_question(ANIMALS, 4, next(numbers), rng) for _ in range(size)]
        (folder / f"animals_{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sayings = []
    for number in range(90):
        one, two, three = rng.choices(COLOURS + ANIMALS, k=3)
        context, said = "Use few words." if number % 3 else "", f"{three} " * (1 + number % 5)
        sayings.append(
            dict(instruction=f"Say {one} and {two} {number}.", input=context, output=said)
        )
    (folder / "sayings.json").write_text(json.dumps(sayings))
    return folder


@pytest.fixture(scope="session")
def tiny_decoder(tiny_texts, tmp_path_factory):
    """Folder of an untrained Llama of two layers with its tokenizer, called `tiny`, as
    `DecoderSeed.save` writes it."""
    import torch

    from harmomoe.data.domains import load_benchmark
    from harmomoe.models.decoder import untrained_decoder

    torch.set_num_threads(1)
    benchmark = load_benchmark(tiny_texts, "colours,animals", "sayings")
    texts = [domain.train for domain in (benchmark.pool, *benchmark.clients)]
    seed = untrained_decoder(
        texts, initializer_range=0.2
    )  # so that scores and experts differ visibly
    seed.name, folder = "tiny", tmp_path_factory.mktemp("decoders") / "tiny"
    folder.mkdir()
    seed.save(folder)
    return folder
