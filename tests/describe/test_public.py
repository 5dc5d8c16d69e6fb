"""What everybody has: computed when it is asked for, once, and again only when something changed
that it depends on."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from harmomoe.base.artefacts import stages_run
from harmomoe.config.settings import changed
from harmomoe.data.domains import fingerprint
from harmomoe.describe.public import Public
from harmomoe.describe.routing import RoutingVectors, form_means, log_ratios, mean_routing
from harmomoe.moe.context import FORMS, vector_size

# what is computed for `everything`
ALL = ["embeddings", "embeddings-shard", *["means"] * len(FORMS), "units"]


@pytest.fixture
def public(tiny_seed, tiny_benchmark, tiny_settings, tmp_path):
    "With a folder of its own, in which nothing is yet."
    return Public(tiny_seed, tiny_benchmark.pool, tiny_settings, tmp_path / "public")


def with_changes(public, **changes):
    return public.with_config(changed(public.config, changes.pop("settings", {}) | changes))


# ---- what it says


def test_nothing_is_computed_or_written_before_it_is_asked_for(public, tmp_path):
    with stages_run() as ran:
        for form in ("logistic", "moments", "activation", "evidence"):
            public.routing(form)  # zeros
        assert public.fingerprint == fingerprint(public.pool.train) and len(public.sample) == 40
    assert ran == [] and not any(tmp_path.iterdir())


def test_embeddings_are_the_seeds(public):
    found = public.embeddings
    assert isinstance(found, np.memmap) and not found.flags.writeable
    assert np.allclose(found, public.seed.embed(public.pool.train).numpy(), atol=1e-5)


def test_the_sample_is_of_the_pool_in_its_order_and_the_same_for_everybody(public, tmp_path):
    pool, size = public.pool.train, public.config.routing.public_samples
    data = pool.add_column("number", range(len(pool)))
    numbered = replace(public, pool=replace(public.pool, train=data))
    numbers = numbered.sample["number"]
    assert len(numbers) == size == len(set(numbers)) and numbers == sorted(numbers)
    elsewhere = replace(numbered, folder=tmp_path / "elsewhere")
    assert elsewhere.sample["number"] == numbers
    other = with_changes(numbered, random_state=1)
    assert other.sample["number"] != numbers
    few = with_changes(numbered, **{"routing.public_samples": 10})
    assert set(few.sample["number"]) < set(numbers)  # the first of one drawing
    more = with_changes(numbered, **{"routing.public_samples": 1000})
    assert more.sample["number"] == list(range(90))


@pytest.mark.parametrize("form", FORMS)
def test_means_are_those_of_the_sample_in_the_seed(form, public):
    wanted = form_means(form, public.seed, public.seed.backbone, public.sample)
    found = public.means(form)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    assert torch.equal(public.means(form), wanted)  # read from the disk


def test_means_of_what_is_being_written_are_those_of_its_beginnings(public, monkeypatch):
    tokens = lambda batch, reach: torch.ones(len(batch["images"]), 5).bool()
    monkeypatch.setattr(public.seed, "token_mask", tokens)
    prefix = {"router.context": "prefix", "router.form": "logistic", "router.horizon": 3.0}
    given = "logistic", public.seed, public.seed.backbone, public.sample, "prefix"
    once = with_changes(public, **prefix).means("logistic")
    assert torch.equal(once, form_means(*given))
    several = with_changes(public, **prefix, **{"routing.beginnings": 4}).means("logistic")
    assert several.shape[1] == 4 * once.shape[1]
    assert torch.equal(several, form_means(*given, 4, 3.0))


def test_the_seeds_own_vectors_are_the_samples_mean_or_zero(public):
    found = public.routing("mean")
    assert torch.equal(found.vectors, mean_routing(public.means("mean")).vectors)
    for form in ("logistic", "moments", "activation", "evidence"):
        found = public.routing(form)
        assert found.form == form
        assert found.vectors.shape == (2, vector_size(form, 64, 256))
        assert not found.vectors.any() and not found.biases.any()


def test_units_are_those_of_the_sample_in_the_seed(public):
    exact = public.means("evidence").double().numpy()
    center, scale = public.units
    assert center.shape == scale.shape == (2, 2 * (64 + 256)) and scale.min() >= 1e-6
    assert np.allclose(center, exact.mean(1), atol=1e-6)
    assert np.allclose(scale, exact.std(1) + 1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "change, again",
    [
        ({"random_state": 1}, ["means", "units"]),
        ({"routing.public_samples": 30}, ["means", "units"]),
        ({"router.context": "prompt"}, ["means", "units"]),
        ({"router.seed_logit": -2.0, "expert.rank": 2}, []),
    ],
    ids=str,
)
def test_units_are_kept_for_whoever_asks_next_and_follow_the_sample(change, again, public):
    first, other = public.units, with_changes(public, settings=change)
    with stages_run() as ran:
        found = other.units
    assert sorted(ran) == again
    exact = other.means("evidence").double().numpy()
    assert np.allclose(found[0], exact.mean(1), atol=1e-6)
    with stages_run() as ran:
        assert all(torch.equal(one, two) for one, two in zip(public.units, first))
        assert all(torch.equal(one, two) for one, two in zip(replace(other).units, found))
    assert ran == []


@pytest.mark.parametrize("form", ["logistic", "moments", "activation", "evidence"])
def test_log_ratios_are_in_the_pools_own_units(form, public):
    means = public.means(form)[:, :7]
    drawn = torch.randn(2, vector_size(form, 64, 256), generator=torch.manual_seed(0))
    routing = RoutingVectors(drawn, torch.tensor([0.5, -1.0]), form)
    units = public.units if form == "evidence" else None
    found = public.log_ratios(routing, means)
    assert found.shape == (2, 7) and torch.equal(found, log_ratios(routing, means, units))


@pytest.mark.parametrize("ask", ["means", "routing"])
def test_an_unknown_form_is_refused_and_leaves_nothing(ask, public, tmp_path):
    said = "is 'random', but must be one of mean, logistic, moments, activation, evidence"
    with pytest.raises(ValueError, match=said):
        getattr(public, ask)("random")
    assert not any((tmp_path / "public").glob("means-*"))


def test_progress_is_shown_only_if_it_is_to_be(public):
    assert public.label("training") == ""
    assert replace(public, progress=True).label("training") == "training"


# ---- nothing twice


def everything(public):
    "All that it can be asked for."
    means = [public.means(form) for form in FORMS]
    return [public.fingerprint, public.embeddings, *means, torch.stack(public.units)]


def test_everything_is_computed_once_by_whoever_asks_first(public):
    with stages_run() as ran:
        everything(public)
    assert sorted(ran) == ALL
    with stages_run() as ran:
        everything(public)
        everything(replace(public))  # another object, as of another process
    assert ran == []


def test_it_can_be_taken_elsewhere(public, tmp_path):
    everything(public)
    shutil.copytree(public.folder, tmp_path / "copy")
    with stages_run() as ran:
        everything(replace(public, folder=tmp_path / "copy"))
        everything(replace(public, folder=str(tmp_path / "copy")))
    assert ran == []


def test_other_settings_share_what_does_not_depend_on_them(public):
    first = everything(public)
    changes = {"expert.rank": 2, "router.top_k": 2, "proxies.number": 3, "finetune.epochs": 0}
    other = with_changes(public, settings=changes)
    assert other.config.expert.rank == 2 and public.config.expert.rank == 4
    assert (other.seed, other.pool, other.folder) == (public.seed, public.pool, public.folder)
    with stages_run() as ran:
        found = everything(other)
    assert ran == [] and found[1] is first[1]  # not even read again
    assert all(torch.equal(one, two) for one, two in zip(found[2:], first[2:]))


@pytest.mark.parametrize(
    "change, again",
    [
        ({"random_state": 1}, ["means"]),
        ({"routing.public_samples": 30}, ["means"]),
        ({"router.context": "prompt"}, ["means"]),  # which for images is the same
        ({"router.lam": 0.5}, []),
    ],
    ids=str,
)
def test_means_follow_the_sample_and_going_back_costs_nothing(change, again, public):
    before, other = public.means("logistic"), with_changes(public, settings=change)
    with stages_run() as ran:
        found = other.means("logistic")
    assert ran == again
    assert torch.equal(
        found, form_means("logistic", public.seed, public.seed.backbone, other.sample)
    )
    with stages_run() as ran:
        assert torch.equal(public.means("logistic"), before)
        assert torch.equal(other.means("logistic"), found)
    assert ran == []


def test_another_pool_is_embedded_beside_the_first(public):
    first = public.embeddings
    fewer = replace(public, pool=replace(public.pool, train=public.pool.train.select(range(60))))
    assert fewer.fingerprint != public.fingerprint
    assert np.allclose(fewer.embeddings, first[:60], atol=1e-5)
    with stages_run() as ran:
        assert len(replace(public).embeddings) == 90 and len(replace(fewer).embeddings) == 60
    assert ran == []


def test_another_seed_is_asked_again(public, monkeypatch):
    before = everything(public)
    monkeypatch.setattr(public.seed, "prompt", "another {}")
    with stages_run() as ran:
        found = everything(replace(public))
    assert sorted(ran) == ALL
    assert all(np.array_equal(one, two) for one, two in zip(found[1:], before[1:]))


def test_damaged_files_are_made_again(public):
    before = everything(public)
    wanted = [np.asarray(each).copy() for each in before[1:]]  # files stay mapped into memory
    for file in public.folder.rglob("*.npy"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with stages_run() as ran:
        found = everything(replace(public))
    assert sorted(ran) == ALL
    assert all(np.array_equal(one, two) for one, two in zip(found[1:], wanted))
