"""The report of a run: what is in it, that data cannot break out of it, that nothing is fetched,
and that it works in a browser."""

import csv
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pandas as pd
import pytest

from harmomoe.base.artefacts import stages_run
from harmomoe.bench import experiment as experiment_module
from harmomoe.bench import report as module
from harmomoe.bench.experiment import open_experiment
from harmomoe.bench.report import open_run, write_report
from harmomoe.bundle.files import FILES
from harmomoe.models.evaluate import BITS, write_results

SETTINGS = (
    "proxies.candidates=40, proxies.number=12, routing.public_samples=40, expert.rank=4, "
    "expert.epochs=1, expert.batch_size=16, finetune.epochs=1, finetune.batch_size=16"
)
HOSTILE = {
    "red_stripes": "<script>alert(1)</script>",
    "green_stripes": "</script><img src=x onerror=alert(2)>",
    "yellow_checks": "$$x^2$$ @sample {{data}} $index",
    "cyan_cross": "&lt;b&gt; \u2028 \" ' `",
    "red_disc": "--><svg onload=alert(3)>",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class Page(HTMLParser):
    "A report, taken apart."

    def __init__(self, text):
        super().__init__()
        self.tags, self.said, self.scripts, self.text = [], [], {}, text
        self.inside = None  # name of the script, "style", or None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.inside = tag if tag == "style" else dict(attributes).get("id", len(self.scripts))

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.said.append(data)
        elif self.inside != "style":
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    @property
    def data(self):
        "What the page's own script draws from."
        return json.loads(self.scripts["data"])

    @property
    def words(self):
        "What is to be read without the script."
        return " ".join(" ".join(self.said).split())


@pytest.fixture(scope="module", autouse=True)
def process():
    "The process stays as it is: other tests in it are to get the same numbers as before."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_module, "faster_cpu", lambda: None)
        yield


def finish(notebook, given, folder):
    "A run as the notebook leaves it, and its report."
    made = open_experiment(notebook, notebook == "run_nlp", **given, out=str(folder))
    results = {"zeroshot": made.measure_method("zeroshot")}
    results |= {f"expert:{name}": made.measure_own(name) for name in made.clients}
    results["harmomoe"] = made.measure_own()
    write_results(folder, results, parameters=given, seed_model=made.public.seed.identity)
    stages = pd.DataFrame({"seconds": [1.25, 30.0]}, index=["seed & data", "<b>experts</b>"])
    stages.to_csv(folder / "stages.csv")
    page = Page(write_report(made).read_text(encoding="utf-8"))
    return SimpleNamespace(made=made, folder=folder, results=results, page=page, given=given)


def hostile_folder(source, folder):
    "The tiny benchmark with other names of classes."
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for file in sorted(source.glob("*.parquet")):
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            row["class_name"] = HOSTILE.get(row["class_name"], row["class_name"])
        pq.write_table(pa.Table.from_pylist(rows), folder / file.name)
    return folder


@pytest.fixture(scope="module")
def images(tiny_seed_folder, tiny_folder, tmp_path_factory):
    "A run on images whose classes and folder have the worst of names."
    data = hostile_folder(tiny_folder, tmp_path_factory.mktemp("data") / "<b>tiny & co")
    given = dict(backbone=str(tiny_seed_folder), data=str(data), clients="a,b,c", pool="pool")
    given |= dict(settings=SETTINGS, threads=1)
    return finish("run_cv", given, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def texts(tiny_decoder, tiny_texts, tmp_path_factory):
    given = dict(backbone=str(tiny_decoder), data=str(tiny_texts), clients="colours,animals")
    given |= dict(pool="sayings", preset="text", threads=1)
    given["settings"] = f"{SETTINGS}, reading.train=20, reading.test=10, expert.warmup_steps=0"
    return finish("run_nlp", given, tmp_path_factory.mktemp("texts"))


@pytest.fixture(params=["images", "texts"])
def run(request):
    return request.getfixturevalue(request.param)


# ---- what is shown


def test_map_has_the_pool_private_samples_and_proxies_by_every_method(run):
    data, benchmark = run.page.data, run.made.benchmark
    points, pool = data["points"], data["pool"]
    assert {len(column) for column in points.values()} == {len(points["x"])}
    assert set(points["origin"][:pool]) == {benchmark.pool.name}
    assert points["row"][:pool] == list(range(len(benchmark.pool.train)))
    for one, client in zip(data["clients"], run.made.clients.values()):
        assert one["name"] == client.domain.name
        assert [points["row"][k] for k in one["private"]] == list(range(len(client.domain.train)))
        assert {points["origin"][k] for k in one["private"]} == {one["name"]}
        assert set(one["proxies"]) == set(data["ways"]) == {"random", "similarity", "dpp"}
        assert one["proxies"]["dpp"] == client.proxies.ids.tolist()
        assert one["relevance"] == pytest.approx(client.relevance.scores, abs=0.001)


def test_every_sample_is_shown(run):
    "Images as small pictures, texts by their first words."
    data = run.page.data
    tests = [sample for samples in data["tests"] for sample in samples]
    shown = data["points"]["sample"] + [sample["sample"] for sample in tests]
    if not data["texts"]:
        assert all(sample.startswith("data:image/webp;base64,") for sample in shown)
        return
    assert all(0 < len(sample) < 700 for sample in shown)
    assert shown[0] == run.made.benchmark.pool.train[0]["prompt"].partition("tion:\n")[2].strip()


def test_test_samples_have_a_way_through_the_layers_and_an_answer(run):
    data, model, tables = run.page.data, run.made.server.unify(), run.results["harmomoe"]
    domains = [*run.made.clients.values()]
    for samples, client in zip(data["tests"], domains):
        assert [sample["row"] for sample in samples] == list(range(len(client.domain.test)))
        for sample in samples:
            assert len(sample["share"]) == len(model.layers)
            for row in sample["share"]:
                assert len(row) == len(model.experts)
                assert sum(row) == pytest.approx(1, abs=0.002)
        right = sum(sample["answer"] == sample["label"] for sample in samples)
        assert right == tables.domains[client.domain.name].correct
    public = data["tests"][len(domains)]
    assert {sample["answer"] for sample in public} == {None}
    assert {sample["domain"] for sample in public} == {run.made.benchmark.pool.name}


def test_accuracy_and_costs_are_those_of_the_run(run):
    rows = list(csv.reader((run.folder / "table.csv").open()))
    texts = run.page.data["texts"]
    columns = [*run.made.clients, "average", BITS if texts else "public", "joint"]
    assert rows[0] == ["method", *columns]
    for row in rows[1:]:
        for name, x in zip(columns, row[1:]):
            shown = f"{float(x):.3f}" if name == BITS else f"{float(x):.1f}"
            assert f'number">{shown}<' in no_best(run.page.text)
    drawn = [*run.made.clients, *([] if texts else ["public"]), "joint"]
    assert [name for name, _ in run.page.data["domains"]] == drawn
    for name, bundle in run.made.server.received.items():
        assert f"{name} {bundle.bytes / 1e3:,.1f} kB" in run.page.words
    assert "seed & data 1.2 s" in run.page.words or "seed & data 1.3 s" in run.page.words
    assert "<b>experts</b> 30.0 s" in run.page.words
    for title in ("Seed, zero-shot", "Expert for", "HarmoMoE (ours)"):
        assert title in run.page.words


def no_best(text):
    "A page without the mark on the best numbers."
    return text.replace('"number best"', '"number"')


def test_run_without_stages_has_a_report_all_the_same(images, tmp_path):
    folder = shutil.copytree(images.folder, tmp_path / "out")
    (folder / "stages.csv").unlink()
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "This run has written no stages.csv." in page.words
    assert "Whole run" not in page.words


# ---- what is private


def test_first_of_all_it_says_that_it_holds_private_data(run):
    names = ", ".join(run.made.clients)
    heading, told = "A run of harmomoe:", "Not for sending. This file holds private data: sam"
    assert run.page.words.index(heading) < run.page.words.index(told) < 500
    assert f"samples of {names}." in run.page.words


def test_nothing_of_it_goes_into_a_bundle_and_nothing_is_kept(run):
    with stages_run() as built:
        write_report(run.made)
    assert built == []
    assert {file.name for file in run.folder.glob("*.html")} == {"report.html"}
    for bundle in run.made.server.received.values():
        files = {file.relative_to(bundle.folder).as_posix() for file in bundle.folder.rglob("*.*")}
        assert files == {*FILES, "manifest.json"}


# ---- what it is made of


def test_names_from_data_are_text(images):
    page, data = images.page, images.page.data
    assert [tag for tag, _ in page.tags].count("script") == 4
    assert {"img", "svg", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert set(data["points"]["label"]) > set(HOSTILE.values())
    assert "embedded" not in page.words and "tiny on <b>tiny & co" in page.words
    for name in HOSTILE.values():
        assert name not in page.text or name == html.escape(name)
    assert not re.search(r"[<>&]", page.scripts["data"] + page.scripts["plots"])
    assert page.scripts.keys() == {"data", "plots", 2, 3}


def test_nothing_is_fetched(run):
    for tag, attributes in run.page.tags:
        for name in ("src", "href", "srcset", "action"):
            assert name not in attributes, (tag, attributes)
    rules = [a["content"] for _, a in run.page.tags if "http-equiv" in a]
    assert rules == [
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    ]
    style = run.page.text.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert len(run.page.text) < 3e6
    assert not re.search(r"\{\{\w+\}\}", run.page.text.partition('<script type="app')[0])


def test_same_run_has_the_same_bytes_whatever_was_drawn_before(run):
    from bokeh.plotting import figure

    first = (run.folder / "report.html").read_bytes()
    figure().scatter([1], [2])
    assert write_report(run.made).read_bytes() == first
    assert write_report(run.folder).read_bytes() == first


def test_folder_opens_as_the_run_that_it_holds(run):
    made = open_run(run.folder)
    assert made.config == run.made.config
    assert made.source == run.made.source
    assert made.folder == run.folder


# ---- what is refused


def test_folder_without_a_table_is_refused(tmp_path):
    for call in (open_run, write_report):
        with pytest.raises(FileNotFoundError, match="name the folder of a finished run"):
            call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_bokeh_it_says_what_to_install(images, monkeypatch):
    (images.folder / "report.html").unlink()
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(ImportError, match=r'pip install "harmomoe\[notebooks\]"') as caught:
        write_report(images.made)
    assert caught.value.__suppress_context__
    assert not (images.folder / "report.html").exists()
    monkeypatch.undo()
    write_report(images.made)


def test_importing_it_does_not_import_bokeh():
    code = "import sys, harmomoe.bench.report as r; print('bokeh' in sys.modules, r.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", module.__name__]


# ---- in a browser

BROWSERS = "chromium", "chromium-browser", "google-chrome", "chrome"
BEFORE = """
window.problems = [];
window.alert = (said) => problems.push(`alert ${said}`);
for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
  window.addEventListener(kind, (event) =>
    problems.push(`${kind} ${event.message || event.reason || event.blockedURI}`));
for (const kind of ["error", "warn"]) console[kind] = (...said) => problems.push(said.join(" "));
"""
AFTER = """
const soon = (ms) => new Promise((done) => setTimeout(done, ms));
const model = (name) => Bokeh.documents[0].get_model_by_name(name);
const tip = (node) => {
  for (const one of node.querySelectorAll("*")) {
    if (one.shadowRoot === null) continue;
    const found = one.classList.contains("bk-Tooltip") ? one.shadowRoot : tip(one.shadowRoot);
    if (found && found.querySelector("b")) return found;
  }
};
const hover = (name, k) => {
  const view = [...Bokeh.index].find((one) => one.model.name === "map");
  const data = model(`${name}-source`).data;
  const box = view.canvas_view.el.getBoundingClientRect();
  const clientX = box.left + view.frame.x_scale.compute(data.x[k]);
  const clientY = box.top + view.frame.y_scale.compute(data.y[k]);
  const mouse = { isPrimary: true, pointerType: "mouse" };
  const how = { clientX, clientY, bubbles: true, composed: true, ...mouse };
  const area = view.canvas_view.events_el;
  area.dispatchEvent(new PointerEvent("pointermove", how));
  area.dispatchEvent(new MouseEvent("mousemove", how));
};
const choose = (id, k) => {
  document.getElementById(id).selectedIndex = k;
  document.getElementById(id).dispatchEvent(new Event("change"));
};
(async () => {
  while (!window.Bokeh || !Bokeh.documents.length || !model("pool-source").data.x.length)
    await soon(50);
  await soon(500);
  const seen = { rendered: document.querySelectorAll(".plot > *").length };
  seen.drawn = ["pool", "private", "proxies"].map((n) => [...model(`${n}-source`).data.index]);
  hover("proxies", 0);
  await soon(300);
  const shown = tip(document);
  seen.tip = shown ? shown.textContent : null;
  seen.picture = shown && shown.querySelector("img") ? shown.querySelector("img").src : null;
  model("private-source").selected.indices = [0];
  seen.kept = document.getElementById("chosen").innerText;
  choose("client", 1);
  document.querySelectorAll("#ways input")[0].click();
  seen.second = [...model("proxies-source").data.index];
  choose("domain", 1);
  document.querySelectorAll("#samples button")[2].click();
  seen.asked = document.getElementById("asked").innerText;
  seen.share = [...model("routing-source").data.share];
  document.querySelectorAll("#domains input")[0].click();
  seen.hidden = !model("dots-0").visible;
  seen.wider = document.documentElement.scrollWidth - window.innerWidth;
  seen.problems = window.problems;
  const said = document.createElement("pre");
  said.id = "seen";
  said.textContent = JSON.stringify(seen);
  document.body.append(said);
})();
"""


@pytest.fixture(scope="module")
def browser():
    "A function (report, width) that uses a page in a headless browser and says what was seen."
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is on the PATH")

    def use(text, folder, width):
        page = text.replace("<title>", f"<script>{BEFORE}</script><title>", 1)
        head, _, tail = page.rpartition("</body>")
        (folder / "page.html").write_text(
            f"{head}<script>{AFTER}</script></body>{tail}", encoding="utf-8"
        )
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--window-size={width},4000", "--virtual-time-budget=20000"]
        command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
        address = (folder / "page.html").as_uri()
        ran = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
        said = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
        assert [line for line in said if '"[bokeh ' not in line] == []
        found = re.search(r'<pre id="seen">(.*?)</pre>', ran.stdout, flags=re.DOTALL)
        assert found, ran.stdout[-2000:] + ran.stderr[-2000:]
        return json.loads(html.unescape(found[1]))

    return use


@pytest.mark.parametrize("width", [1400, 420])
def test_page_works_in_a_browser(run, width, browser, tmp_path):
    seen, data = browser(run.page.text, tmp_path, width), run.page.data
    points, (first, second, *_) = data["points"], data["clients"]
    assert seen["problems"] == []
    assert seen["rendered"] == 3
    assert seen["wider"] <= 0
    pool = [k for k in range(data["pool"]) if k not in first["proxies"]["dpp"]]
    assert seen["drawn"] == [pool, first["private"], first["proxies"]["dpp"]]
    place = first["private"][0]
    assert points["label"][place] in seen["kept"]
    assert f"{points['origin'][place]}, row {points['row'][place]}" in seen["kept"]
    assert seen["second"] == second["proxies"]["random"]
    sample = data["tests"][1][2]
    assert f"HarmoMoE says: {sample['answer']}" in seen["asked"]
    assert seen["share"] == [value for layer in sample["share"] for value in layer]
    assert seen["hidden"]
    tipped = [first["proxies"]["dpp"][0]]  # or a sample that lies over it
    tipped += [k for k, x in enumerate(points["x"]) if abs(x - points["x"][tipped[0]]) < 2]
    assert any(points["label"][k] in seen["tip"] for k in tipped)
    if not data["texts"]:
        assert seen["picture"] in {points["sample"][k] for k in tipped}
