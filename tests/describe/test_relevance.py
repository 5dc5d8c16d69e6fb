"""Relevance: of what a sample is like, not of how often it was seen; a probability for every
sample, by either classifier."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from harmomoe.describe.relevance import (
    Relevance,
    fine_tuned_classifier,
    linear_probe,
    relevance_figure,
)


def clouds(n=60, size=300, shift=1.5, width=5, random_state=0):
    "Private and public points; a third of the public ones lie where the private ones do."
    rng = np.random.default_rng(random_state)
    private, pool = rng.standard_normal((n, width)) + shift, rng.standard_normal((size, width))
    pool[: size // 3] += shift
    return private.astype(np.float32), pool.astype(np.float32)


# ---- the probe


def test_probe_finds_the_public_samples_that_are_like_the_private_ones():
    private, pool = clouds()
    found = linear_probe(private, pool)
    assert found.scores.dtype == found.private.dtype == np.float64
    assert found.scores.shape == (300,) and found.private.shape == (60,)
    for values in (found.scores, found.private):
        assert ((values > 0) & (values < 1)).all()
    assert roc_auc_score(np.arange(300) < 100, found.scores) > 0.9


def test_scores_are_calibrated():
    "On average they are the share of private samples among all."
    private, pool = clouds()
    found = linear_probe(private, pool)
    mean = np.concatenate([found.private, found.scores]).mean()
    assert mean == pytest.approx(60 / 360, abs=0.01)


def test_no_sample_is_scored_by_a_probe_that_saw_it():
    "Where there is nothing to learn, a probe that saw the samples would find them nevertheless."
    rng = np.random.default_rng(0)
    private, pool = (rng.standard_normal((n, 100)).astype(np.float32) for n in (60, 300))
    found = linear_probe(private, pool, inverse_penalties=(1e3,))
    y = np.arange(360) < 60
    assert roc_auc_score(y, np.concatenate([found.private, found.scores])) < 0.65
    assert found.facts["auc"] < 0.65


def test_negatives_bound_what_is_trained_against_and_all_are_scored():
    private, pool = clouds()
    found = linear_probe(private, pool, negatives=100)
    assert found.facts["negatives"] == 100 and found.scores.shape == (300,)
    assert linear_probe(private, pool, negatives=1000).facts["negatives"] == 300
    assert np.corrcoef(found.scores, linear_probe(private, pool).scores)[0, 1] > 0.9


def test_random_state_decides_and_the_global_generator_does_not():
    private, pool = clouds()
    first = linear_probe(private, pool, negatives=100, random_state=1)
    np.random.seed(5)
    again = linear_probe(private, pool, negatives=100, random_state=1)
    other = linear_probe(private, pool, negatives=100, random_state=2)
    assert np.array_equal(first.scores, again.scores) and first.facts == again.facts
    assert not np.array_equal(first.scores, other.scores)


def test_offset_and_scale_of_the_embeddings_do_not_matter():
    private, pool = clouds()
    scale, offset = np.float32([1, 10, 0.1, 5, 2]), np.float32([0, 100, -3, 1, 7])
    moved = linear_probe(private * scale + offset, pool * scale + offset)
    assert np.allclose(moved.scores, linear_probe(private, pool).scores, atol=0.01)


def test_facts_say_how_well_unseen_samples_are_told_apart():
    private, pool = clouds()
    found = linear_probe(private, pool)
    scores = np.concatenate([found.private, found.scores])
    y = np.arange(360) < 60
    assert found.facts.keys() == {"method", "C", "negatives", "auc", "log_loss"}
    assert found.facts["auc"] == pytest.approx(roc_auc_score(y, scores))
    losses = -np.log(np.where(y, scores, 1 - scores))
    assert found.facts["log_loss"] == pytest.approx(losses.mean(), rel=1e-6)
    above = (found.scores > 0.5).sum()
    assert found.describe().startswith(f"AUC {found.facts['auc']:.4f}, log loss ")
    assert found.describe().endswith(f"{above} of 300 public samples above 0.5")


@pytest.mark.parametrize("shapes", [((20, 5), (30, 6)), ((20,), (30, 5)), ((20, 5), (30, 5, 1))])
def test_embeddings_that_do_not_fit_are_refused(shapes):
    private, pool = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=r"must be \[n, d\] with one d, but are"):
        linear_probe(private, pool)


def test_figure_has_a_panel_a_client_and_marks_the_candidates():
    found = linear_probe(*clouds())
    figure = relevance_figure(dict(a=found, b=found), 50)
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]
    assert "top 50" in figure.axes[0].get_legend_handles_labels()[1]
    certain = Relevance(np.array([0.0, 1.0]), np.array([1.0, 0.0]), {})  # has no finite odds
    relevance_figure(dict(a=certain))


# ---- fine-tuning


def test_fine_tuning_gives_a_probability_for_every_sample_and_leaves_the_seed_alone(
    tiny_seed, tiny_benchmark
):
    before, given = tiny_seed.identity, (tiny_benchmark.clients[0].train, tiny_benchmark.pool.train)
    found = [fine_tuned_classifier(tiny_seed, *given, random_state=1) for _ in range(2)]
    assert found[0].scores.shape == (90,) and found[0].private.shape == (30,)
    for values in (found[0].scores, found[0].private):
        assert ((values >= 0) & (values <= 1)).all() and values.std() > 0
    assert np.array_equal(found[0].scores, found[1].scores) and tiny_seed.identity == before
    assert not any(p.requires_grad for p in tiny_seed.backbone.parameters())
    assert found[0].facts["method"] == "finetune" and found[0].facts["negatives"] == 90


def test_fine_tuning_works_for_as_few_samples_as_it_asks_for(tiny_seed, tiny_benchmark):
    private, pool = tiny_benchmark.clients[0].train, tiny_benchmark.pool.train
    ten = range(10)
    fine_tuned_classifier(tiny_seed, private.select(ten), pool.select(ten), random_state=3)


def test_both_classifiers_refuse_too_few_samples(tiny_seed, tiny_benchmark):
    private, pool = tiny_benchmark.clients[0].train, tiny_benchmark.pool.train
    few = torch.ones(9, 4).numpy()
    said = "at least 10 private and 10 public samples, but there are"
    with pytest.raises(ValueError, match=f"{said} 9 and 90"):
        linear_probe(few, np.ones((90, 4), np.float32))
    with pytest.raises(ValueError, match=f"{said} 30 and 9"):
        fine_tuned_classifier(tiny_seed, private, pool.select(range(9)))
