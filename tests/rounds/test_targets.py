"Target experts: as defined, deterministic, and a map that strangers may have written."

import itertools
import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from small_mixtures import build, built, every_kind, passages

from harmomoe.rounds.experts import Observed, RoutedExperts
from harmomoe.rounds.targets import (
    SHARES,
    SLACK,
    TargetMap,
    background,
    find_targets,
    random_targets,
    read_targets,
    scores,
    select,
    targets_figure,
)

MODEL = "0" * 64


def some_map(**changes):
    fields = dict(model=MODEL, domain="law", score="gate", differential=False, p=0.6, samples=3)
    rows, targets = [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], [[0, 1], [1]]
    return TargetMap(**fields | dict(scores=rows, targets=targets) | changes)


def test_selection_is_the_smallest_set_with_the_largest_sum():
    rng = np.random.default_rng(1)
    for trial in range(300):
        size = int(rng.integers(1, 7))
        row = rng.dirichlet(np.full(size, 0.7)).round(9)
        if trial % 3 == 0 and size > 2:  # ties and zeros
            row = np.array([*row[:-2], 0.0, row[-2] + row[-1]])
            row[0] = row[-1]
            row = (row / row.sum()).round(9)
        p = float(rng.uniform(0.01, 1))
        found = select(row, p)
        sets = [s for n in range(1, size + 1) for s in itertools.combinations(range(size), n)]
        reach = [s for s in sets if row[list(s)].sum() >= p - SLACK]
        assert len(found) == min(map(len, reach)) and tuple(found) in reach
        rivals = [row[list(s)].sum() for s in reach if len(s) == len(found)]
        assert row[found].sum() >= max(rivals) - 1e-12
        same = [s for s in reach if len(s) == len(found)]
        equal = [s for s in same if sorted(row[list(s)]) == sorted(row[found])]
        assert tuple(found) == min(equal)  # ties go to the lowest numbers


def test_selection_at_the_ends():
    assert select([0.2] * 5, 0.2) == [0] and select([0.2] * 5, 1) == [0, 1, 2, 3, 4]
    assert select([0.0, 0.0], 0.1) == [] and select([0.0, 1.0], 1.0) == [1]
    assert select([1 / 3 for _ in range(3)], 1) == [0, 1, 2]
    for p in (0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="p is"):
            select([1.0], p)


@every_kind
def test_scores_are_normalised_within_layers_over_what_may_be_a_target(kind):
    model, view = built(kind)
    observed = view.observe(model.seed, passages())
    general = view.observe(model.seed, passages("spanish"))
    for score, raw in (("gate", "gate"), ("token", "chosen")):
        found = scores(view, observed, score)
        first = view.all_targets[0][0]  # 1 where the seed's own expert is the first
        own, other = (getattr(one, raw)[:, first:] for one in (observed, general))
        shares = own / own.sum(1, keepdims=True)
        assert not found[:, :first].any() and np.abs(found[:, first:] - shares).max() < 1e-8
        more = np.maximum(shares - other / other.sum(1, keepdims=True), 0)
        wanted = more / more.sum(1, keepdims=True)
        assert np.abs(scores(view, observed, score, general)[:, first:] - wanted).max() < 1e-8
    assert not scores(view, observed, "gate", observed).any()  # nothing stands out
    with pytest.raises(ValueError, match="score is"):
        scores(view, observed, "fame")


def test_layers_are_not_mixed():
    "A busy layer takes nothing from the others, as a sum over layers would."
    _, view = built("olmoe", experts=3, top_k=1)
    gate = np.array([[0.9, 0.05, 0.0], [0.01, 0.03, 0.02]])
    found = scores(view, Observed(gate, gate, 1), "gate")
    assert np.allclose(found.sum(1), 1)
    assert [select(row, 0.4) for row in found] == [[0], [1]]


@every_kind
def test_maps_come_back_as_they_were(kind, tmp_path):
    model, view = built(kind)
    for score, general in (("gate", None), ("token", None), ("gate", passages("spanish"))):
        found = find_targets(view, model.seed, passages(), "rust", score, general=general)
        assert found.p == SHARES[score] and found.differential == (general is not None)
        assert read_targets(found.write(tmp_path / "map.json"), view) == found
        assert view.check_targets(found.targets) == found.targets
        again = find_targets(view, model.seed, passages(), "rust", score, general=general)
        assert again == found
    assert [path.name for path in tmp_path.iterdir()] == ["map.json"]
    other = RoutedExperts(build(kind).backbone)
    state = other.state(other.all_targets)
    other.load_state({name: x + 1 for name, x in state.items()}, other.all_targets)
    with pytest.raises(ValueError, match="is of the model"):
        read_targets(tmp_path / "map.json", other)


@pytest.mark.parametrize(
    "change, what",
    [
        (dict(targets=[[0], [1]]), "do not follow"),
        (dict(targets=[[1, 0], [1]]), "do not follow"),
        (dict(p=0.7, targets=[[0, 1], [1]]), None),
        (dict(p=float("nan")), "finite"),
        (dict(p=-1.0), "p is"),
        (dict(model="x"), "hexadecimal"),
        (dict(domain=""), "1 to 64"),
        (dict(domain="a\nb"), "1 to 64"),
        (dict(samples=0), "samples"),
        (dict(scores=[[0.5, 0.5], [1.0]]), "as many"),
        (dict(scores=[]), "as many"),
        (dict(scores=[[0.5, 0.4, 0.0], [0.0, 1.0, 0.0]]), "layer 0"),
        (dict(scores=[[1.5, -0.5, 0.0], [0.0, 1.0, 0.0]]), "layer 0"),
        (dict(scores=[[0.0] * 3] * 2, targets=[[], []]), "no expert"),
        (dict(score="fame"), "score"),
        (dict(more=1), "more"),
        (dict(targets="all"), "targets"),
    ],
)
def test_hostile_maps(change, what, tmp_path):
    file = some_map().write(tmp_path / "map.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if what is None:
        assert read_targets(file).p == change["p"]
        return
    with pytest.raises(ValueError, match=what) as caught:
        read_targets(file)
    assert "map.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_map_of_another_model_is_refused_before_it_is_used(tmp_path):
    file = some_map().write(tmp_path / "map.json")
    _, view = built("olmoe")
    with pytest.raises(ValueError, match="is of the model 000000000000"):
        read_targets(file, view)


def test_random_targets_are_as_many_and_others():
    _, view = built("unified")
    like = [[1, 2], []]
    found = [random_targets(view, like, state) for state in range(30)]
    assert {tuple(map(len, one)) for one in found} == {(2, 0)}
    assert {e for one in found for e in one[0]} == {1, 2, 3, 4}
    assert random_targets(view, like, 7) == found[7]
    with pytest.raises(ValueError, match="layer 1"):
        random_targets(view, [[1], [1] * 5])


def test_working_sets_hold_targets_and_the_best_of_the_rest():
    rows = [[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]
    assert background([[0], []], rows, 0.5, 2) == [[0, 2, 3], [0, 1]]
    assert background([[0], [3]], rows, 0.3, 1) == [[0, 3], [3]]
    assert background([[0], [3]], rows, 1.0) == [[0, 1, 2, 3], [3]]
    assert background([[0], [3]], rows, 0.1, 9) == [[0, 1, 2, 3]] * 2


def test_the_picture_frames_the_targets():
    figure = targets_figure({"law": some_map(), "again": some_map()})
    try:
        assert [len(axis.patches) for axis in figure.axes] == [3, 3]
        assert [axis.get_title() for axis in figure.axes] == ["law", "again"]
    finally:
        plt.close(figure)
