"The methods on the tiny images, each played once."

import shutil
from dataclasses import replace
from functools import lru_cache

import pytest


@pytest.fixture(scope="session")
def rows(tiny):
    "A function (data set) -> the set of its images as (domain, split, row)."
    from datasets import Image

    def encoded(dataset):
        return dataset.select_columns(["image"]).cast_column("image", Image(decode=False))["image"]

    images = [
        (image["bytes"], (domain.name, split, row))
        for domain in (tiny.pool, *tiny.clients)
        for split in ("train", "validation", "test")
        for row, image in enumerate(encoded(getattr(domain, split)))
    ]
    known = dict(images)
    assert len(known) == len(images)
    return lambda dataset: {known[image["bytes"]] for image in encoded(dataset)}


@pytest.fixture(scope="session")
def play(tiny, rows, tmp_path_factory):
    """A function (name of a method, random state) -> a Watch. Methods share what clients computed,
    as in a comparison; what is public each computes anew."""
    from watching import Watch

    from harmomoe.baselines.methods import find_method

    @lru_cache
    def folder(random_state):
        work = tmp_path_factory.mktemp("work")
        if random_state == tiny.settings.random_state:
            shutil.copytree(tiny.work, work, dirs_exist_ok=True)  # HarmoMoE's clients
        return work

    @lru_cache
    def run(name, random_state):
        config = replace(tiny.settings, random_state=random_state)
        public = replace(tiny.public, config=config, folder=tmp_path_factory.mktemp("public"))
        return Watch(find_method(name), public, tiny.clients, rows, folder(random_state))

    return lambda name, random_state=0: run(name, random_state)


@pytest.fixture(scope="session")
def batch(tiny):
    "A batch of 44 images of all domains, none of which anybody trained on."
    from datasets import concatenate_datasets

    from harmomoe.data.samples import labelled

    data = concatenate_datasets([labelled(domain.test) for domain in (tiny.pool, *tiny.clients)])
    return next(iter(tiny.seed.batches(data, batch_size=100)))


@pytest.fixture(scope="session")
def logits(tiny, batch):
    "A function (model, batch) -> scores over all class names, by name of the model."
    import torch
    from watching import members

    classes = [name for domain in (tiny.pool, *tiny.clients) for name in domain.classes]

    @torch.no_grad()
    def score(model, batch=batch):
        return {name: own.scorer(classes)(batch) for name, own in members(model).items()}

    return score
