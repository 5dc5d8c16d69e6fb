"How well a model does, how sure that is, how it is written down, and how fast it is."

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from families import ABC, QUESTIONS, REPLIES, only, scores, seed_of
from scipy.stats import binomtest

from harmomoe.data.corpora import load_corpora
from harmomoe.data.domains import Benchmark
from harmomoe.data.samples import in_a_stream, labelled
from harmomoe.data.texts import text_dataset
from harmomoe.models.ensemble import Ensemble, Personal
from harmomoe.models.evaluate import (
    BITS,
    FIGURE_SPACE,
    HARD_SPACE,
    Measured,
    accuracy_figure,
    best_of,
    by_next_token,
    details,
    joint_space,
    markdown_table,
    mean_interval,
    measure,
    measure_all,
    measure_spaces,
    read_measured,
    results_table,
    throughput,
    write_results,
)
from harmomoe.models.model import Model
from harmomoe.models.seed import Accuracy, BitsPerByte
from harmomoe.models.weights import open_seed

RESULTS = {
    "zeroshot": {"a": Accuracy(1, 4), "b": Accuracy(1, 3)},
    "harmomoe": {"a": Accuracy(4, 4), "b": Accuracy(2, 3)},
}


@pytest.fixture
def zero_shot(tiny_seed):
    "The seed as a model."
    return Model(tiny_seed, tiny_seed.backbone)


# ---- how right


def test_accuracy_counts_the_best_scored_class_over_the_given_classes(tiny_benchmark, zero_shot):
    client, seed = tiny_benchmark.clients[2], zero_shot.seed
    classes = list(reversed(client.classes))
    images = torch.nn.functional.normalize(seed.embed(client.test), dim=1)
    best = (images @ seed.label_features(tuple(classes)).T).argmax(1).tolist()
    names = labelled(client.test)["class_name"]
    right = sum(classes[i] == name for i, name in zip(best, names))
    for batch_size in (None, 256, 5):
        assert measure(zero_shot, client.test, classes, batch_size) == Accuracy(right, 12)


def test_it_is_the_models_own_scores_that_count(tiny_benchmark, zero_shot):
    "A model that always scores the class of the label highest, and one that does so lowest."
    client = tiny_benchmark.clients[0]
    for sign, correct in ((1, 12), (-1, 0)):
        given = lambda batch: sign * torch.eye(3)[batch["targets"]]
        zero_shot.scorer = lambda classes: given
        assert measure(zero_shot, client.test, client.classes) == Accuracy(correct, 12)


def test_accuracy_refuses_no_data_and_a_class_not_asked_for(tiny_benchmark, zero_shot):
    data, classes = tiny_benchmark.clients[0].test, tiny_benchmark.clients[0].classes
    with pytest.raises(ValueError, match="the data set is empty"):
        measure(zero_shot, data.select([]), classes)
    with pytest.raises(ValueError, match="not in the label space"):
        measure(zero_shot, data, classes[1:])


def test_questions_are_answered_by_the_letter_of_the_highest_score():
    seed = seed_of()
    right = scores(seed).argmax(1) == only(seed, QUESTIONS, label_space=ABC)["targets"]
    for batch_size in (None, 1, 3):
        found = measure(Model(seed, seed.backbone), QUESTIONS, ABC, batch_size)
        assert found == Accuracy(right.sum().item(), 4)


def test_where_there_is_nothing_to_choose_text_is_measured_in_bits_per_byte():
    seed = seed_of()
    model = Model(seed, seed.backbone)
    found, apart = (measure(model, REPLIES, ["text"], size) for size in (3, 1))
    assert type(found) is BitsPerByte and found.bits > 0
    assert found.bytes == apart.bytes and found.nats == pytest.approx(apart.nats, rel=1e-5)


def test_texts_of_one_group_count_as_one_in_the_interval():
    seed, owners = seed_of(), ["b", "a", "b", "c"]
    model = Model(seed, seed.backbone)
    said = "Blue.", "A pale red.", "Green or yellow.", "No."
    rows = [dict(instruction="Name a colour.", input="", output=one) for one in said]
    plain = text_dataset(rows, "colours")
    grouped = plain.add_column("group", owners)
    each = [measure(model, plain.select([row]), ["text"]) for row in range(4)]
    found, apart = (measure(model, data, ["text"], batch_size=3) for data in (grouped, plain))
    assert (found.texts, apart.texts) == (3, 4) and found.bits == pytest.approx(apart.bits)
    ratio = found.nats / found.bytes  # two texts of one group are in two batches
    parts = [(one.nats, one.bytes) for one in (each[0] + each[2], each[1], each[3])]
    squares = sum((nats - ratio * size) ** 2 for nats, size in parts)
    half = 1.959964 * math.sqrt(3 / 2 * squares) / found.bytes / math.log(2)
    assert np.diff(found.interval) / 2 == pytest.approx(half, rel=1e-3)
    assert measure(model, grouped.select([0, 2]), ["text"]).interval is None
    assert measure(model, in_a_stream({"": grouped})[""], ["text"]).texts == 3


@pytest.mark.parametrize("correct, n", [(0, 1), (1, 1), (0, 50), (7, 12), (50, 50), (8577, 10_000)])
def test_interval_is_wilsons(correct, n):
    reference = binomtest(correct, n).proportion_ci(0.95, "wilson")
    found = Accuracy(correct, n)
    assert found.interval == pytest.approx((100 * reference.low, 100 * reference.high), abs=1e-4)
    assert found.percent == pytest.approx(100 * correct / n)


# ---- several label spaces


def prefers(*order):
    "Scores of a model that takes the first class of these that there is, or else the right one."

    def scores(names, classes):
        first = next((name for name in order if name in classes), None)
        wanted = [first or name for name in names]
        return torch.tensor([[float(c == want) for c in classes] for want in wanted])

    return scores


@pytest.fixture
def fake(tiny_seed):
    "A model whose scores are a function of (the samples' classes, label space)."

    def fake(scores):
        model = Model(tiny_seed, tiny_seed.backbone)
        names = lambda batch, classes: [classes[k] for k in batch["targets"]]
        model.scorer = lambda classes: lambda batch: scores(names(batch, classes), classes)
        return model

    return fake


def test_a_model_that_prefers_a_public_class_is_right_on_the_domains_and_wrong_jointly(
    fake, tiny_benchmark
):
    found = measure_all(fake(prefers("red_disc")), tiny_benchmark)
    sizes = dict(a=12, b=8, c=12)
    assert found.domains == {name: Accuracy(n, n) for name, n in sizes.items()}
    assert found.joint == {name: Accuracy(0, n) for name, n in sizes.items()}
    assert found.public == (Accuracy(2, 12),)  # two of the pool's twelve are red


def test_a_model_that_prefers_another_clients_class_is_wrong_jointly_and_right_in_public(
    fake, tiny_benchmark
):
    found = measure_all(fake(prefers("purple_checks")), tiny_benchmark)
    assert [a.percent for a in found.domains.values()] == [100, 50, 100]
    assert [a.percent for a in found.joint.values()] == [0, 50, 0]
    assert found.public == (Accuracy(12, 12),)


def test_it_is_the_split_that_was_asked_for(fake, tiny_benchmark):
    found = measure_all(fake(prefers()), tiny_benchmark, "validation")
    assert {name: a.n for name, a in found.joint.items()} == dict(a=6, b=4, c=8)
    assert found.public == (Accuracy(12, 12),)
    fewer = replace(tiny_benchmark.pool, validation=tiny_benchmark.pool.validation.select([0]))
    other = Benchmark("fewer", fewer, tiny_benchmark.clients)
    assert measure_all(fake(prefers()), other, "validation").public == (Accuracy(1, 1),)


def test_joint_is_over_all_classes_of_clients_then_of_the_pool(tiny_benchmark):
    space = joint_space(tiny_benchmark)
    names = [c.classes for c in tiny_benchmark.clients]
    assert space == [*names[0], *names[1], *names[2], *tiny_benchmark.pool.classes]


def renamed(domain, **names):
    "A domain some of whose classes are called otherwise."

    def part(data):
        new = [names.get(name, name) for name in domain.classes]
        return data.cast_column("label", data.features["label"].__class__(names=new))

    splits = {split: part(getattr(domain, split)) for split in ("train", "validation", "test")}
    return replace(domain, **splits)


def test_a_class_that_pool_and_client_share_is_one_class_and_right_for_both(fake, tiny_benchmark):
    "The client's name stays, in whose case the pool's is found."
    pool = renamed(tiny_benchmark.pool, red_disc="RED_Stripes", blue_disc="green_stripes")
    shared = Benchmark("shared", pool, tiny_benchmark.clients)
    space = joint_space(shared)
    assert len(space) == len(joint_space(tiny_benchmark)) - 2
    assert "RED_Stripes" not in space and space.count("green_stripes") == 1
    assert space[0] == "red_stripes"
    right = measure_all(fake(prefers()), shared)
    assert {a.percent for a in (*right.joint.values(), *right.public)} == {100}
    # and a model that says the shared class is right for those who are of it
    one = measure_all(fake(prefers("red_stripes")), shared)
    assert one.joint["a"] == Accuracy(4, 12) and one.joint["b"].correct == 0


def counted(seed, monkeypatch):
    "A list that gets an entry for each batch that a backbone of the seed reads."
    read, hidden = [], seed.hidden
    noted = lambda backbone, batch: read.append(len(batch["targets"])) or hidden(backbone, batch)
    monkeypatch.setattr(seed, "hidden", noted)
    return read


@pytest.mark.parametrize("members", [1, 2])
def test_images_are_read_once_for_several_label_spaces_with_the_same_result(
    members, tiny_seed, tiny_benchmark, monkeypatch
):
    "By one network, or by two whose probabilities over each label space are averaged."
    client, other = tiny_benchmark.clients[0], tiny_seed.new_backbone()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model = Model(tiny_seed, other)
    if members == 2:
        model = Ensemble(tiny_seed, [tiny_seed.backbone, other])
    spaces = dict(
        own=client.classes, joint=joint_space(tiny_benchmark), other=["x", *client.classes]
    )
    apart = {name: measure(model, client.test, classes) for name, classes in spaces.items()}
    read = counted(tiny_seed, monkeypatch)
    assert measure_spaces(model, client.test, spaces, 5) == apart
    assert read == [n for n in (5, 5, 2) for _ in range(members)]


def test_each_client_is_asked_its_own_model_and_public_is_the_mean_of_them(
    fake, tiny_benchmark, tiny_seed
):
    members = dict(a=fake(prefers()), b=fake(prefers("red_disc")), c=fake(prefers("yellow_checks")))
    found = measure_all(Personal(members), tiny_benchmark)
    assert [a.percent for a in found.domains.values()] == [100, 100, 100]
    assert [a.percent for a in found.joint.values()] == [100, 0, 0]
    assert found.public == (Accuracy(12, 12), Accuracy(2, 12), Accuracy(12, 12))
    told = details(found)["public"]
    assert told["percent"] == pytest.approx(100 * 26 / 36)
    assert told["interval"][0] == pytest.approx(np.mean([a.interval[0] for a in found.public]))
    assert [one["correct"] for one in told["models"]] == [12, 2, 12]
    # one model for all clients is asked once
    same = measure_all(Personal(dict.fromkeys("abc", members["a"])), tiny_benchmark)
    assert len(same.public) == 1 and "models" not in details(same)["public"]


def test_no_sample_is_an_error_and_so_is_a_class_that_one_of_the_spaces_lacks(
    tiny_benchmark, zero_shot
):
    client = tiny_benchmark.clients[0]
    with pytest.raises(ValueError, match="the data set is empty"):
        measure_spaces(zero_shot, client.test.select([]), dict(own=client.classes))
    spaces = dict(own=client.classes, short=client.classes[1:])
    with pytest.raises(ValueError, match="not in the label space of 2 classes"):
        measure_spaces(zero_shot, client.test, spaces)


def test_any_letter_may_be_the_answer_where_the_number_of_choices_is_not_to_tell(monkeypatch):
    "Four questions with two or three choices; a model that always says D or E."
    letters, seed = ["A", "B", "C", "D", "E"], seed_of()
    kind, scored = type(seed.task(letters)), []

    def by_letter(task, backbone, batch):
        scored.append([len(choices) for choices in batch["choices"]])
        return torch.arange(5.0)[: len(task.classes)].expand(len(batch["choices"]), -1)

    monkeypatch.setattr(kind, "by_letter", by_letter)
    model, spaces = Model(seed, seed.backbone), dict(own=ABC, joint=letters)
    found = measure_spaces(model, QUESTIONS, spaces, any_letter=["joint"])
    assert found == dict(own=Accuracy(2, 4), joint=Accuracy(0, 4))
    assert scored == [[3, 3, 2, 2], [5, 5, 5, 5]]  # similar lengths together, the longest first
    assert measure_spaces(model, QUESTIONS, spaces)["joint"] == found["own"]


def texts(pool):
    "Questions as the only client, and a pool."
    data = {split: QUESTIONS for split in ("train", "validation", "test")}
    client = SimpleNamespace(name="q", classes=ABC, **data)
    return SimpleNamespace(pool=pool, clients=[client])


@pytest.mark.parametrize("scoring", ["text", "cloze"])
def test_questions_scored_by_their_choices_are_answered_alike_in_any_label_space(scoring):
    seed = seed_of(scoring=scoring)
    pool = SimpleNamespace(test=[], classes=["text"])
    model, benchmark = Model(seed, seed.backbone), texts(pool)
    more = dict(classes=["A", "B", "C", "D"], test=QUESTIONS)
    benchmark.clients.append(SimpleNamespace(name="r", **more))
    found, union = measure_all(model, benchmark), joint_space(benchmark)
    assert union == more["classes"]
    assert found.joint == found.domains == dict.fromkeys("qr", measure(model, QUESTIONS, union))


def test_public_text_is_measured_in_bits_per_byte_with_an_interval_and_has_no_class():
    seed = seed_of()
    model, pool = Model(seed, seed.backbone), SimpleNamespace(test=REPLIES, classes=["text"])
    found = measure_all(model, texts(pool))
    assert found.public == (measure(model, REPLIES, ["text"]),)
    assert joint_space(texts(pool)) == ABC
    told = details(found)["public"]
    assert told["interval"][0] < told["bits"] < told["interval"][1]
    assert told["bits"] == found.public[0].bits
    assert read_measured(json.loads(json.dumps(found.counts))) == found


def test_a_pool_without_held_out_samples_has_no_column():
    seed = seed_of()
    pool = SimpleNamespace(test=REPLIES.select([]), classes=["text"])
    found = measure_all(Model(seed, seed.backbone), texts(pool))
    assert found.public == ()
    assert list(results_table({"x": found})) == ["q", "average", "joint"]


# ---- how it is written down


@pytest.mark.parametrize("counts", [[(5, 10)], [(3, 10), (80, 90), (7, 7)], [(0, 40), (40, 40)]])
def test_interval_of_a_mean_is_put_together_from_those_of_its_parts(counts):
    parts = [Accuracy(*count) for count in counts]
    low, high = mean_interval(parts)
    middle = np.mean([a.percent for a in parts])
    below = sum((a.percent - a.interval[0]) ** 2 for a in parts) ** 0.5 / len(parts)
    above = sum((a.interval[1] - a.percent) ** 2 for a in parts) ** 0.5 / len(parts)
    assert (low, high) == pytest.approx((middle - below, middle + above))
    assert -1e-9 <= low < high <= 100 + 1e-9
    if len(parts) == 1:
        assert (low, high) == pytest.approx(parts[0].interval)


def test_results_are_written_in_three_formats_that_agree(tmp_path):
    table = write_results(tmp_path, RESULTS, note="x")
    assert table.loc["zeroshot"].tolist() == pytest.approx([25, 100 / 3, (25 + 100 / 3) / 2])
    lines = ["method,a,b,average", "zeroshot,25.0,33.33,29.17", "harmomoe,100.0,66.67,83.33"]
    assert (tmp_path / "table.csv").read_text().split() == lines
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "| method | a | b | average |"
    assert lines[2] == "| zeroshot | 25.00 | 33.33 | 29.17 |"
    told = json.loads((tmp_path / "table.json").read_text())
    assert told["note"] == "x" and told["accuracy"]["harmomoe"]["b"]["correct"] == 2
    average = told["accuracy"]["harmomoe"]["average"]
    assert average["percent"] == pytest.approx(250 / 3)
    assert average["interval"] == list(mean_interval(RESULTS["harmomoe"].values()))
    assert told["accuracy"]["zeroshot"]["a"]["interval"] == list(Accuracy(1, 4).interval)


def measured(public, joint=(1, 2)):
    own, parts = dict(a=Accuracy(1, 4), b=Accuracy(3, 4)), (Accuracy(c, 4) for c in joint)
    return Measured(own, dict(zip("ab", parts)), public)


def test_public_and_joint_follow_the_average(tmp_path):
    rows = {"ours": measured((Accuracy(1, 8),)), "told": measured((Accuracy(2, 8), Accuracy(4, 8)))}
    table = write_results(tmp_path, rows, ["told"])
    assert table.columns.tolist() == ["a", "b", "average", "public", "joint"]
    assert table.loc["ours"].tolist() == [25, 75, 50, 12.5, 37.5]
    lines = ["method,a,b,average,public,joint", "ours,25.0,75.0,50.0,12.5,37.5"]
    assert (tmp_path / "table.csv").read_text().split() == [*lines, "told,25.0,75.0,50.0,37.5,37.5"]
    assert "| told † | 25.00 |" in (tmp_path / "table.md").read_text()
    told = json.loads((tmp_path / "table.json").read_text())["accuracy"]["ours"]
    assert told["public"] == dict(
        percent=12.5, interval=list(Accuracy(1, 8).interval), correct=1, n=8
    )
    joint = told["joint"]
    assert joint["percent"] == 37.5 and joint["domains"]["b"]["correct"] == 2
    assert joint["interval"] == list(mean_interval([Accuracy(1, 4), Accuracy(2, 4)]))


def test_bits_per_byte_have_a_column_that_says_so_in_which_less_is_better(tmp_path):
    rows = {name: measured((BitsPerByte(nats, 8),)) for name, nats in (("x", 5.0), ("y", 6.0))}
    table = write_results(tmp_path, rows)
    assert table.columns.tolist() == ["a", "b", "average", BITS, "joint"]
    assert table.loc["x", BITS] == pytest.approx(5 / np.log(2) / 8)
    assert "| 0.9017 |" in (tmp_path / "table.md").read_text()
    best = best_of(table)
    assert best == dict(highest=["a", "b", "average", "joint"], lowest=[BITS])
    shown = columns(markdown_table(table, digits=2, **best))
    assert shown[BITS][1:] == ["**0.90**", "1.08"]
    with pytest.raises(ValueError, match="every method needs the same columns"):
        results_table(rows | {"z": measured((Accuracy(1, 8),))})
    assert all("bits" not in name for name in ticks(accuracy_figure(rows)))


def test_where_all_is_plain_text_every_column_is_in_bits_and_less_is_better(tmp_path):
    found = lambda nats: dict(a=BitsPerByte(nats, 8), b=BitsPerByte(2 * nats, 8))
    rows = {
        name: Measured(found(nats), found(2 * nats), (BitsPerByte(nats, 4),))
        for name, nats in (("x", 5.0), ("y", 6.0))
    }
    table = write_results(tmp_path, rows)
    assert table.columns.tolist() == ["a", "b", "average", "public", "joint"]
    assert table.loc["x", "joint"] == pytest.approx(15 / np.log(2) / 8)
    assert best_of(table) == dict(highest=[], lowest=table.columns.tolist())
    assert "| 0.9017 |" in (tmp_path / "table.md").read_text()
    told = json.loads((tmp_path / "table.json").read_text())["accuracy"]["x"]
    assert told["average"]["bits"] == table.loc["x", "average"] and told["a"]["bytes"] == 8
    assert told["average"]["interval"] is None  # for less than two texts nothing is known
    assert read_measured(json.loads(json.dumps(rows["x"].counts))) == rows["x"]
    figure = accuracy_figure({"x": measured_twice(rows["x"])})
    assert ticks(figure) == ["a", "b", "public", "joint"]
    assert figure.axes[0].get_ylabel() == "bits per byte"


def measured_twice(row):
    "The same with two texts in each place, so that intervals are known."
    two = lambda one: replace(one, texts=2, nats_nats=one.nats**2, bytes_bytes=one.bytes**2)
    parts = ({name: two(one) for name, one in part.items()} for part in (row.domains, row.joint))
    return Measured(*parts, tuple(map(two, row.public)))


def test_plain_text_is_joined_as_a_stream(tiny_plain):
    seed, benchmark = tiny_plain
    found = measure_all(Model(seed, seed.backbone), benchmark)
    parts = {client.name: client.test for client in benchmark.clients}
    for client in benchmark.clients:
        own, stream = client.test, in_a_stream(parts)[client.name]
        for data, one in ((own, found.domains), (stream, found.joint)):
            assert one[client.name] == measure(Model(seed, seed.backbone), data, client.classes)
        assert found.joint[client.name].texts == len(own)
    assert found.joint != found.domains
    tokens = by_next_token(found)
    for data, one in ((benchmark.pool.test, tokens.public[0]), (own, tokens.domains["spanish"])):
        assert one.n == sum((batch["labels"] != -100).sum() for batch in seed.batches(data))


def test_next_tokens_are_told_of_plain_text_alone_and_not_of_rows_from_before():
    text = BitsPerByte(5.0, 8, right=3, tokens=4)
    stream = {"x": BitsPerByte(1.0, 2, right=2, tokens=4), "y": text}
    rows = {
        name: Measured(dict(a=text), dict(a=text + one), (text,)) for name, one in stream.items()
    }
    tokens = {name: by_next_token(row) for name, row in rows.items()}
    table = results_table(tokens)
    assert table.loc["x"].tolist() == [75, 75, 75, 62.5]
    assert best_of(table) == dict(highest=["a", "average", "public", "joint"], lowest=[])
    told = rows["x"].counts
    assert read_measured(json.loads(json.dumps(told))) == rows["x"]
    for one in (told["accuracy"]["a"], told["joint"]["a"], *told["public"]):
        assert {"right", "tokens"} <= one.keys()
        del one["right"], one["tokens"]
    before = read_measured(told)
    assert before.domains["a"].bits == text.bits and by_next_token(before) is None
    assert by_next_token(measured((text,))) is None  # beside questions
    assert by_next_token(replace(rows["x"], public=before.public)) is None


@pytest.fixture
def tiny_plain(tiny_decoder):
    "A decoder, and a benchmark of two kinds of passages."
    whole = load_corpora(("rust", "spanish"))
    cut = lambda domain: domain.take(train=8, validation=4, test=4)
    clients = [cut(client) for client in whole.clients]
    return open_seed(str(tiny_decoder)), Benchmark("plain", cut(whole.pool), clients)


@pytest.mark.parametrize("name", ["average", "public", "joint"])
def test_a_domain_is_not_called_like_another_column(name):
    row = Measured({name: Accuracy(1, 2)}, {name: Accuracy(1, 2)}, (Accuracy(1, 2),))
    with pytest.raises(ValueError, match=f"a domain is called '{name}'"):
        results_table({"x": row})


def ticks(figure):
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_bars_of_public_and_joint_stand_beside_those_of_the_domains():
    matplotlib.use("agg")
    figure = accuracy_figure({"ours": measured((Accuracy(1, 8),))}, "ours")
    assert ticks(figure) == ["a", "b", "public", "joint"]
    [bars] = [group for group in figure.axes[0].containers if hasattr(group, "patches")]
    assert [bar.get_height() for bar in bars] == [25, 75, 12.5, 37.5]


TABLE = pd.DataFrame(
    {
        "flags": ["9.5 ± 4.0", "61.8 ± 14.0", "70.0 ± 1.0"],
        "against": ["-52.3 ± 3.0", "", "+8.2 ± 0.1"],
        "s": [0.25, 1234.0, float("nan")],
        "paper": ["59.06", "93.2", ""],
        "images": [1440, 7, 7],
        "kind": ["-", "a|b", ""],
        "times": ["0.94 (0.90 to 0.97)", "56.92", "25%"],
        "size": ["3 experts", "1 at once", "16 at once"],
    },
    ["x", "ours", "told one"],
).rename_axis("method")


def columns(written: str) -> dict[str, list[str]]:
    """What stands in each column of a table in Markdown, the rule first."""
    lines = [line[2:-2].replace(HARD_SPACE, " ").split(" | ") for line in written.splitlines()]
    return {head: rows for head, *rows in zip(*(line for line in lines if len(line) > 1))}


def test_a_table_to_read_has_the_best_in_bold_and_ours_and_who_was_told_marked():
    best = dict(highest=["flags"], lowest=["s", "images"], digits={"s": 2, "paper": 2})
    written = markdown_table(TABLE, "One.", title=str.title, ours="ours", told=["told one"], **best)
    found = columns(written)
    assert found["method"][1:] == ["X", "**Ours**", "Told One †"]
    assert found["flags"][1:] == [
        f"9.5 ± {FIGURE_SPACE}4.0",
        "**61.8 ± 14.0**",
        f"70.0 ± {FIGURE_SPACE}1.0",
    ]
    assert found["against"][1:] == ["\u221252.3 ± 3.0", "", "+8.2 ± 0.1"]
    assert found["s"][1:] == ["**0.25**", "1,234.00", ""]
    assert found["paper"][1:] == ["59.06", "93.20", ""]
    assert found["images"][1:] == ["1,440", "**7**", "7"]
    assert written.endswith("\n\n: One.")


def test_a_table_to_read_has_numbers_to_the_right_and_breaks_no_line_within_one():
    written = markdown_table(TABLE)
    rules = {name: rule for name, (rule, *_) in columns(written.replace("\\|", "/")).items()}
    numbers = {name for name, rule in rules.items() if rule.endswith(":")}
    assert numbers == {"flags", "against", "s", "paper", "images", "times"}
    assert {name for name, rule in rules.items() if set(rule) == {"-"}} == {
        "method",
        "kind",
        "size",
    }
    assert f"9.5{HARD_SPACE}±{HARD_SPACE}" in written and "a\\|b" in written
    assert "**" not in written and ":::" not in written
    wide = markdown_table(TABLE, wide=True)
    assert wide == f"::: {{.column-page}}\n\n{written}\n\n:::"


def test_methods_of_different_domains_have_no_common_table():
    with pytest.raises(ValueError, match="every method needs the same domains"):
        results_table(RESULTS | {"x": {"a": Accuracy(1, 1)}})


def test_bars_are_as_high_as_the_accuracies_and_ours_stands_out():
    matplotlib.use("agg")
    [axis] = accuracy_figure(RESULTS).axes
    groups = [group for group in axis.containers if hasattr(group, "patches")]
    heights = [[bar.get_height() for bar in group] for group in groups]
    assert heights == [[a.percent for a in row.values()] for row in RESULTS.values()]
    assert [bar.get_hatch() for group in groups for bar in group] == [None, None, "//", "//"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == list(RESULTS)


# ---- how fast


def test_throughput_compares_every_model_with_the_first(tiny_benchmark, zero_shot):
    models = dict(seed=zero_shot, copy=Model(zero_shot.seed, zero_shot.seed.new_backbone()))
    pool = tiny_benchmark.pool
    found = throughput(models, pool.test, pool.classes, rounds=3)
    assert found.index.tolist() == ["seed", "copy"] and found.loc["seed", "ratio"] == 1
    assert (found["samples/s"] > 0).all()
    assert (found["lowest"] <= found["ratio"]).all()
    assert (found["ratio"] <= found["highest"]).all()


def test_models_take_turns_and_the_first_round_does_not_count(
    tiny_benchmark, zero_shot, monkeypatch
):
    "By a clock on which the models take 1 and 4 seconds, and ten times as long at first."
    now, turns, pool = [0.0], [], tiny_benchmark.pool

    def taking(name, seconds):
        def score(batch):
            turns.append(name)
            now[0] += seconds * (10 if turns.count(name) == 1 else 1)
            return torch.zeros(1)

        model = Model(zero_shot.seed, zero_shot.backbone)
        model.scorer = lambda classes: score
        return model

    monkeypatch.setattr("harmomoe.models.evaluate.time.perf_counter", lambda: now[0])
    models = dict(quick=taking("quick", 1.0), slow=taking("slow", 4.0))
    found = throughput(models, pool.test, pool.classes, batch_size=8, rounds=2)
    assert turns == ["quick", "slow"] * 3
    assert found.loc["quick"].tolist() == [8, 1, 1, 1]
    assert found.loc["slow"].tolist() == [2, 0.25, 0.25, 0.25]
