"How well a model does, how sure that is, how it is written down, and how fast it is."

import json

import matplotlib
import pandas as pd
import pytest
import torch
from families import ABC, QUESTIONS, REPLIES, only, scores, seed_of
from scipy.stats import binomtest

from harmomoe.data.samples import labelled
from harmomoe.models.evaluate import (
    FIGURE_SPACE,
    HARD_SPACE,
    accuracy_figure,
    markdown_table,
    measure,
    results_table,
    throughput,
    write_results,
)
from harmomoe.models.model import Model
from harmomoe.models.seed import Accuracy, BitsPerByte

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


@pytest.mark.parametrize("correct, n", [(0, 1), (1, 1), (0, 50), (7, 12), (50, 50), (8577, 10_000)])
def test_interval_is_wilsons(correct, n):
    reference = binomtest(correct, n).proportion_ci(0.95, "wilson")
    found = Accuracy(correct, n)
    assert found.interval == pytest.approx((100 * reference.low, 100 * reference.high), abs=1e-4)
    assert found.percent == pytest.approx(100 * correct / n)


# ---- how it is written down


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
    assert told["accuracy"]["harmomoe"]["average"] == pytest.approx(250 / 3)
    assert told["accuracy"]["zeroshot"]["a"]["interval"] == list(Accuracy(1, 4).interval)


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
