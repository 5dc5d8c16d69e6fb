"Likeness is Levenshtein's; planted texts come out of a model that knows them, and of no other."

import difflib

import numpy as np
import pytest
import torch

from harmomoe.audit.extraction import extracted, likeness, planted_texts
from harmomoe.data.corpora import load_corpus
from harmomoe.models.decoder import untrained_decoder
from harmomoe.models.model import Model


def test_likeness_is_the_distance_by_its_recursion():
    def distance(a, b):
        if not a or not b:
            return len(a) + len(b)
        same = distance(a[1:], b[1:]) + (a[0] != b[0])
        return min(same, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)

    rng = np.random.default_rng(0)
    for _ in range(30):
        a, b = (rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in range(2))
        wanted = 1 - distance(a, b) / max(len(a), len(b)) if a or b else 1
        assert likeness(a, b) == pytest.approx(wanted)
        assert likeness(a, b) == likeness(b, a)
    assert difflib.SequenceMatcher(None, "abcd", "abxd").ratio() == likeness("abcd", "abxd")


def test_model_that_knows_a_text_writes_it_down_and_no_other():
    texts = planted_texts(load_corpus("pool").train, 4, 16)
    seed = untrained_decoder([texts], hidden_size=64, intermediate_size=128)
    model = Model(seed, seed.new_backbone())
    assert extracted(model, texts, samples=2).max() < 0.5
    model.backbone.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.backbone.parameters(), 1e-2)
    task = seed.task(["text"])
    for _ in range(60):
        for batch in seed.batches(texts.select(range(2)), ["text"], 2):
            task.loss(model.backbone, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.backbone.eval()
    found = extracted(model, texts, samples=3)
    assert found[:2].min() >= 0.9 and found[2:].max() < 0.6
    np.testing.assert_array_equal(found, extracted(model, texts, samples=3))


def test_what_writes_no_text_is_refused(tiny_seed):
    texts = planted_texts(load_corpus("pool").train, 2, 16)
    assert len(set(texts["prompt"])) == 2
    with pytest.raises(ValueError, match="writes no text"):
        extracted(Model(tiny_seed, tiny_seed.backbone), texts)
    with pytest.raises(ValueError, match="need 100"):
        planted_texts(texts.select([0]), 1)
