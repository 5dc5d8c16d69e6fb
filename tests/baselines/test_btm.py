"Ensembles: what weighs the members."

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from harmomoe.baselines.btm import average_answers, domain_posterior, weigh_answers

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


@pytest.fixture(scope="module")
def weighed(tiny):
    "The three experts, weighed by the posterior of the domain."
    return weigh_answers(tiny.bundles, tiny.public)


@torch.no_grad()
def probabilities(model, classes, batch):
    return model.scorer(classes)(batch).double().softmax(-1)


def of_members(tiny, batch):
    "Probabilities of each client's expert, [B, K, C]."
    experts = [bundle.expert(tiny.seed) for bundle in tiny.bundles]
    return torch.stack([probabilities(one, tiny.pool.classes, batch) for one in experts], 1)


def test_btm_is_the_mean_of_the_experts_probabilities(tiny, batch):
    ensemble = average_answers(tiny.bundles, tiny.public)
    wanted = of_members(tiny, batch).mean(1)
    assert torch.allclose(probabilities(ensemble, tiny.pool.classes, batch), wanted, atol=1e-6)


def test_with_a_posterior_the_experts_are_weighed_by_it(weighed, tiny, batch):
    z = tiny.seed.hidden(tiny.seed.backbone, batch).double()
    weights = (z @ weighed.vectors.double().T + weighed.biases.double()).softmax(-1)
    assert weights.shape == (44, 3) and weights.std(0).min() > 0.01
    wanted = (weights[..., None] * of_members(tiny, batch)).sum(1)
    assert torch.allclose(probabilities(weighed, tiny.pool.classes, batch), wanted, atol=1e-5)


def test_the_posterior_is_that_of_the_proxies(weighed, tiny):
    parts = [tiny.embeddings[bundle.ids] for bundle in tiny.bundles]
    vectors, biases = domain_posterior(parts, tiny.settings.random_state)
    assert torch.allclose(weighed.vectors, vectors, atol=1e-3)
    assert torch.allclose(weighed.biases, biases, atol=1e-3)


@pytest.mark.parametrize("sizes", [(30, 10), (10, 20, 30), (3, 8, 8)], ids=str)
def test_domain_posterior_is_the_classifiers(sizes):
    """Standardisation is folded into the vectors, and two domains have two lines as three have
    three."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(k / 2, 1 + k, (size, 5)).astype(np.float32) for k, size in enumerate(sizes)]
    x, y = np.concatenate(parts).astype(np.float64), np.repeat(range(len(sizes)), sizes)
    search = GridSearchCV(
        LogisticRegression(class_weight="balanced", max_iter=1000),
        dict(C=[1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0]),
        scoring="neg_log_loss",
        cv=StratifiedKFold(min(5, *sizes), shuffle=True, random_state=3),
    ).fit(StandardScaler().fit_transform(x), y)
    wanted = make_pipeline(StandardScaler(), search.best_estimator_).fit(x, y).predict_proba(x)
    vectors, biases = domain_posterior(parts, 3)
    assert vectors.shape == (len(sizes), 5) and biases.shape == (len(sizes),)
    found = (torch.tensor(x).float() @ vectors.T + biases).softmax(-1)
    assert np.allclose(found.numpy(), wanted, atol=1e-5)


def test_a_single_proxy_of_a_domain_is_refused():
    with pytest.raises(ValueError, match="a domain has a single proxy"):
        domain_posterior([np.ones((1, 5), "float32"), np.zeros((9, 5), "float32")])


def test_posterior_of_a_single_client_is_one(tiny, batch):
    classes = tiny.pool.classes
    ensemble = weigh_answers(tiny.bundles[:1], tiny.public)
    alone = probabilities(tiny.bundles[0].expert(tiny.seed), classes, batch)
    assert torch.allclose(probabilities(ensemble, classes, batch), alone, atol=1e-5)
