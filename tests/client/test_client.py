"The whole method on the tiny benchmark: what may change does, nothing else; same seed, same bytes; work done is kept."
import inspect
import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from scipy.stats import binomtest

import harmomoe.unify
from harmomoe.bundle import ADAPTER, ADAPTER_FILES, FILES, PROXIES, read_bundle, save_expert
from harmomoe.core import MANIFEST, read_manifest
from harmomoe.evaluate import Accuracy, accuracy, results_table, throughput, write_results
from harmomoe.experts import Training, expert_data, load_expert, train, train_expert, union_label_space
from harmomoe.finetune import finetune, observe_routing, proxy_union
from harmomoe.layer import RouterSettings
from harmomoe.moe import UnifiedModel, load_model, save_model
from harmomoe.embeddings import cached_embeddings
from harmomoe.relevance import fine_tuned_classifier, linear_probe
from harmomoe.context import FORMS
from harmomoe.routing import FILE as ROUTING
from harmomoe.seed import Model, labelled
from harmomoe.unify import Config, open_benchmark, run_client, select_stage, unify
from helpers import kept, stamps

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
SHORT = Training(epochs=1, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.)


def weights(module): return {name: value.clone() for name, value in module.state_dict().items()}


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a, b, atol=1e-5): return torch.allclose(a, b, atol=atol)


def forbidden(*args, **kwargs): pytest.fail("this work was done already")


@pytest.fixture(scope="module")
def task(tiny):
    "Client a's data, 12 proxies and the label space of its expert."
    a, pool = tiny.a, tiny.pool
    return a.train, pool.train.select(range(12)), union_label_space(a.classes, pool.classes)


@torch.no_grad()
def embed(seed, tower, data, batch_size=64):
    return torch.cat([seed.hidden(tower, batch) for batch in seed.batches(data, batch_size=batch_size)])


def dense(seed, bundle, data):
    "Embeddings by one expert as an ordinary model."
    return embed(seed, load_expert(seed, bundle.folder / "adapter"), data)


def same_files(one, two, names):
    for name in names: assert (one / name).read_bytes() == (two / name).read_bytes(), name


# ---- experts

def test_only_ffn_weights_change_and_every_adapter_moves(tiny, task, tmp_path):
    before = tiny.seed.identity
    start, _ = train_expert(tiny.seed, *task, replace(SHORT, epochs=0), rank=4, alpha=8)
    expert, losses = train_expert(tiny.seed, *task, SHORT, rank=4, alpha=8)
    assert tiny.seed.identity == before and len(losses) == 1 and np.isfinite(losses).all()
    moved = {name for name, value in weights(expert).items() if not torch.equal(value, weights(start)[name])}
    adapters = {name for name in weights(expert) if "lora_" in name}
    assert moved == adapters and len(adapters) == 2 * 2 * len(tiny.seed.layers)
    save_expert(tmp_path, expert)
    merged, seed = weights(load_expert(tiny.seed, tmp_path / "adapter")), weights(tiny.seed.tower)
    assert merged.keys() == seed.keys()
    changed = {name for name in seed if not torch.equal(merged[name], seed[name])}
    assert changed == {f"{layer}.{linear}.weight" for layer in tiny.seed.layers for linear in ("c_fc", "c_proj")}


def test_expert_as_it_trained_and_as_it_is_loaded_are_one_model(tiny, task, tmp_path):
    for dropout in (0., .3):
        expert, _ = train_expert(tiny.seed, *task, SHORT, rank=4, alpha=8, dropout=dropout)
        save_expert(tmp_path, expert)
        loaded = load_expert(tiny.seed, tmp_path / ADAPTER)
        assert close(embed(tiny.seed, expert, task[0]), embed(tiny.seed, loaded, task[0]))


def test_expert_on_the_clients_disk_is_an_adapter_and_nothing_else(tiny, task, tmp_path):
    expert, _ = train_expert(tiny.seed, *task, replace(SHORT, epochs=0), rank=4)
    save_expert(tmp_path, expert)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} \
        == set(ADAPTER_FILES)
    with torch.no_grad(): next(p for name, p in expert.named_parameters() if "lora_A" in name)[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="of the expert is not finite"): save_expert(tmp_path, expert)


def test_expert_without_proxies_trains_on_private_data_alone(tiny, task, monkeypatch):
    private, proxies, space = task
    assert len(expert_data(private, None)) == len(private) and len(expert_data(private, proxies)) == len(private) + 12
    alone, both = (train_expert(tiny.seed, private, part, space, SHORT, rank=4)[0] for part in (None, proxies))
    assert not same(weights(alone), weights(both))


def test_expert_learns_its_own_classes(tiny):
    for client in tiny.clients:
        [expert] = kept(tiny.work / client.name, "expert")
        losses = read_manifest(expert)["facts"]["losses"]
        assert losses[-1] < losses[0]


def with_images_of(domain, other):
    "A domain whose training images are replaced by those of another."
    train, images = domain.train, other.train["image"][:len(domain.train)]
    return replace(domain, train=Dataset.from_dict(dict(image=images, label=train["label"]), train.features))


@pytest.mark.parametrize("form", FORMS)
def test_of_private_images_nothing_but_the_choice_of_proxies_is_in_experts_trained_on_proxies(form, tiny, tmp_path):
    "Random proxies don't depend on private images either: then nothing that is sent does, but their number."
    def sent(domain, **changes):
        settings = replace(tiny.settings, selection="random", router=RouterSettings(initial=form), **changes)
        folder = tmp_path / f"{domain.train._fingerprint}-{len(changes)}"
        return run_client(domain, tiny.seed, tiny.pool, tiny.embeddings, settings, folder)
    one, other = tiny.a, with_images_of(tiny.a, tiny.c)
    same_files(sent(one, private_training=False), sent(other, private_training=False), ADAPTER_FILES + (ROUTING,))
    for name in (ADAPTER_FILES[1], ROUTING):
        assert (sent(one) / name).read_bytes() != (sent(other) / name).read_bytes()


def test_another_loss_is_what_training_minimises(tiny, task):
    data, space, longer = expert_data(*task[:2]), task[2], replace(SHORT, epochs=3)
    score, modes = tiny.seed.scorer(space), []

    def trained(loss):
        expert, _ = train_expert(tiny.seed, *task, replace(SHORT, epochs=0), rank=4)
        return weights(expert), train(tiny.seed, expert, data, space, longer, loss=loss), weights(expert)

    def entropy(tower, batch):
        modes.append(tower.training)
        return F.cross_entropy(score(tower, batch), batch["targets"])

    def size(tower, batch): return tiny.seed.hidden(tower, batch).square().mean()
    start, losses, usual = trained(None)
    assert (again := trained(entropy))[1] == losses and same(again[2], usual) and len(modes) > 3 and all(modes)
    _, losses, shrunk = trained(size)
    assert losses[2] < losses[0] and not same(shrunk, usual) and not same(shrunk, start)
    with pytest.raises(FloatingPointError, match="the loss is nan"): trained(lambda *given: size(*given) * torch.nan)


def test_divergence_is_an_error_that_names_the_learning_rate(tiny, task):
    with pytest.raises(FloatingPointError, match="in epoch [123].*lower the learning rate.*1000000000.0"):
        train_expert(tiny.seed, *task, Training(epochs=3, batch_size=16, learning_rate=1e9), rank=4)


@pytest.mark.parametrize("dropout", [0., .3])
def test_same_seed_gives_the_same_bytes_and_another_seed_others(dropout, tiny, task, tmp_path):
    for folder, rng in (("one", 5), ("second", 5), ("other", 6)):
        np.random.seed(rng * 7); torch.manual_seed(len(folder))       # global generators play no part
        (tmp_path / folder).mkdir()
        expert, _ = train_expert(tiny.seed, *task, SHORT, rank=4, dropout=dropout, rng=rng)
        save_expert(tmp_path / folder, expert)
    same_files(tmp_path / "one", tmp_path / "second", ADAPTER_FILES)
    one, other = (tmp_path / folder / ADAPTER_FILES[1] for folder in ("one", "other"))
    assert one.read_bytes() != other.read_bytes()


def test_dropout_works_in_training_and_only_there(tiny, task):
    plain, dropped = (train_expert(tiny.seed, *task, SHORT, rank=4, dropout=p)[0] for p in (0., .5))
    assert weights(plain).keys() == weights(dropped).keys() and not same(weights(plain), weights(dropped))
    for expert in (plain, dropped): assert not any(module.training for module in expert.modules())
    assert torch.equal(embed(tiny.seed, dropped, task[0]), embed(tiny.seed, dropped, task[0]))
    seen = []
    dropped.register_forward_pre_hook(lambda module, inputs: seen.append(module.training))
    train(tiny.seed, dropped, expert_data(*task[:2]), task[2], SHORT)      # trained on: from evaluation and back
    assert seen and all(seen) and not any(module.training for module in dropped.modules())
    assert not any(module.training for module in tiny.seed.tower.modules())


@pytest.mark.parametrize("wrong, said", [
    (dict(optimizer="adam"), "'adam' is neither"), (dict(batch_size=0), "batch_size is 0"),
    (dict(epochs=-1), "epochs is -1"), (dict(learning_rate=0), "learning_rate is 0"),
    (dict(momentum=-.1), "momentum is -0.1"),
    (dict(weight_decay=-1), "weight_decay is -1"), (dict(warmup_steps=-1), "warmup_steps is -1")])
def test_training_settings_are_checked(wrong, said):
    with pytest.raises(ValueError, match=said): Training(**wrong)


# ---- relevance and selection

def test_pool_is_embedded_once_and_again_only_when_pool_or_seed_change(tiny, tmp_path, monkeypatch):
    pool, calls, embed = tiny.pool, [], tiny.seed.embed
    monkeypatch.setattr(tiny.seed, "embed", lambda *args, **kwargs: calls.append(1) or embed(*args, **kwargs))
    first = cached_embeddings(tiny.seed, pool.train, tmp_path / "pool")
    assert np.array_equal(first, cached_embeddings(tiny.seed, pool.train, tmp_path / "pool")) and len(calls) == 1
    assert np.array_equal(first, embed(pool.train).numpy())
    assert len(cached_embeddings(tiny.seed, pool.test, tmp_path / "pool")) == len(pool.test) and len(calls) == 2
    monkeypatch.setattr(tiny.seed, "prompt", "another {}")
    cached_embeddings(tiny.seed, pool.test, tmp_path / "pool")
    assert len(calls) == 3


def test_relevance_by_fine_tuning_is_a_probability_for_every_sample_and_leaves_the_seed_alone(tiny):
    before = tiny.seed.identity
    found = [fine_tuned_classifier(tiny.seed, tiny.a.train, tiny.pool.train, rng=1) for _ in range(2)]
    assert found[0].scores.shape == (90,) and found[0].private.shape == (30,)
    for values in (found[0].scores, found[0].private): assert ((values >= 0) & (values <= 1)).all() and values.std() > 0
    assert np.array_equal(found[0].scores, found[1].scores) and tiny.seed.identity == before


def test_relevance_by_fine_tuning_works_for_as_few_samples_as_it_asks_for(tiny):
    ten = range(10)
    fine_tuned_classifier(tiny.seed, tiny.a.train.select(ten), tiny.pool.train.select(ten), rng=3)


def test_both_classifiers_refuse_too_few_samples(tiny):
    with pytest.raises(ValueError, match="at least 10 private and 10 public samples, but there are 9 and 90"):
        linear_probe(tiny.embeddings[:9], tiny.embeddings)
    with pytest.raises(ValueError, match="at least 10 private and 10 public samples, but there are 30 and 9"):
        fine_tuned_classifier(tiny.seed, tiny.a.train, tiny.pool.train.select(range(9)))


def test_selection_is_kept_and_another_stands_beside_it_when_something_that_it_depends_on_changes(tiny, tmp_path,
                                                                                                     monkeypatch):
    folder, calls = shutil.copytree(tiny.work / "a", tmp_path / "a"), []

    def noted(name, work): return lambda *args, **kwargs: calls.append(name) or work(*args, **kwargs)
    probe, select = "linear_probe", "select_proxies"
    for name in (probe, select): monkeypatch.setattr(harmomoe.unify, name, noted(name, getattr(harmomoe.unify, name)))

    def chosen(domain=tiny.a, **changes):
        del calls[:]
        settings = replace(tiny.settings, **changes)
        found, _ = select_stage(domain, tiny.seed, tiny.pool.train, tiny.embeddings, settings, folder)
        return found.ids.tolist(), calls[:]
    before = stamps(folder)
    first, done = chosen()
    assert done == []
    assert chosen(finetune=SHORT, expert=SHORT, router=RouterSettings(top_k=2)) == (first, [])
    assert stamps(folder) == before
    assert chosen(proxies=11) == (first[:11], [select])
    for change in (dict(selection="random"), dict(candidates=30)): assert chosen(**change)[1] == [select]
    for change in (dict(rng=1), dict(negatives=50)): assert chosen(**change)[1] == [probe, select]
    assert chosen(replace(tiny.a, train=tiny.a.train.select(range(29))))[1] == [probe, select]
    assert chosen() == (first, []) and chosen(rng=1)[1] == []                # both are there
    assert (len(kept(folder, "relevance")), len(kept(folder, "proxies"))) == (1 + 3, 1 + 6)
    del before["embeddings"]                                                 # of other private data by now
    assert before.items() <= stamps(folder).items()


def test_relevance_is_kept_as_it_was_found(tiny):
    folder, settings = tiny.work / "a", tiny.settings
    _, stored = select_stage(tiny.a, tiny.seed, tiny.pool.train, tiny.embeddings, settings, folder)
    found = linear_probe(tiny.seed.embed(tiny.a.train).numpy(), tiny.embeddings, settings.negatives, rng=settings.rng)
    assert np.array_equal(stored.scores, found.scores) and np.array_equal(stored.private, found.private)
    assert stored.facts == found.facts and stored.describe() == found.describe()


@pytest.mark.parametrize("selection", ["dpp", "similarity", "random"])
def test_more_proxies_than_dimensions_are_completed(selection, tiny, tmp_path):
    "The tiny seed embeds in 32 dimensions."
    settings = replace(tiny.settings, selection=selection, candidates=60, proxies=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = select_stage(tiny.a, tiny.seed, tiny.pool.train, tiny.embeddings, settings, tmp_path)
    assert len(set(found.ids.tolist())) == 50


# ---- one client: finished work is kept, other work is done beside it

def test_second_run_trains_nothing_and_sends_the_same(client, tiny, tmp_path, monkeypatch):
    for name in ("train_expert", "select_proxies", "linear_probe", "client_routing"):
        monkeypatch.setattr(harmomoe.unify, name, forbidden)
    before = stamps(tmp_path / "a")
    assert sorted(name.partition("-")[0] for name in before) == [
        "embeddings", "expert", "proxies", "relevance", "routing"]
    assert client() == tmp_path / "a" / "bundle"
    assert stamps(tmp_path / "a") == before
    same_files(tmp_path / "a" / "bundle", tiny.work / "a" / "bundle", (*FILES, MANIFEST))


def test_expert_is_kept_when_only_the_servers_settings_change(client, tmp_path, monkeypatch):
    monkeypatch.setattr(harmomoe.unify, "train_expert", forbidden)
    before = stamps(tmp_path / "a")
    client(finetune=SHORT, router=RouterSettings(top_k=2))
    assert stamps(tmp_path / "a") == before
    client(public_samples=30)
    assert before.items() <= stamps(tmp_path / "a").items() and len(kept(tmp_path / "a", "expert")) == 1


CHANGES = [dict(expert=SHORT), dict(rank=2), dict(alpha=4), dict(dropout=.2), dict(proxies=11),
           dict(selection="similarity"), dict(proxy_aligned=False), dict(private_training=False), dict(rng=1)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_another_expert_is_trained_when_what_it_depends_on_changes_and_going_back_costs_nothing(
        change, client, tiny, tmp_path, monkeypatch):
    folder, parts = tmp_path / "a", dict(expert=ADAPTER_FILES[1], routing=ROUTING)
    before, old = stamps(folder), {kind: kept(folder, kind) for kind in parts}
    client(**change)
    after = stamps(folder)
    assert before.items() <= after.items()                    # nothing is written over
    for kind, file in parts.items():
        [new] = set(kept(folder, kind)) - set(old[kind])
        content = (new / file).read_bytes()
        assert content != (old[kind][0] / file).read_bytes() and content == (folder / "bundle" / file).read_bytes()
    for name in ("train_expert", "select_proxies", "linear_probe", "client_routing"):
        monkeypatch.setattr(harmomoe.unify, name, forbidden)
    client()
    assert stamps(folder) == after
    same_files(folder / "bundle", tiny.work / "a" / "bundle", (*FILES, MANIFEST))


def test_another_expert_is_trained_when_the_private_data_change(client, tiny, tmp_path):
    client(selection="random")                                # proxies that do not depend on the private data
    old, adapter = kept(tmp_path / "a", "expert"), (tmp_path / "a" / "bundle" / ADAPTER_FILES[1]).read_bytes()
    client(selection="random", train=tiny.a.train.select(range(29)))
    [new] = set(kept(tmp_path / "a", "expert")) - set(old)
    sent = (tmp_path / "a" / "bundle" / ADAPTER_FILES[1]).read_bytes()
    assert sent == (new / ADAPTER_FILES[1]).read_bytes() != adapter


STILL = Training(epochs=0)


@pytest.mark.parametrize("form", FORMS)
def test_routing_is_computed_again_when_private_data_change_that_left_no_trace_in_the_expert(form, client, tiny,
                                                                                             tmp_path):
    "Without epochs the expert is the one that training would start from, whatever it would train on."
    def sent(train=None):
        client(train, expert=STILL, router=RouterSettings(initial=form))
        return read_bundle(shutil.copytree(tmp_path / "a" / "bundle", tmp_path / f"{len(list(tmp_path.iterdir()))}"),
                           tiny.seed)
    domains = [tiny.a, with_images_of(tiny.a, tiny.c), replace(tiny.a, train=tiny.a.train.select(range(29)))]
    bundles = [sent(domain.train) for domain in domains]
    same_files(bundles[0].folder, bundles[1].folder, ADAPTER_FILES)
    same_files(bundles[0].folder, bundles[2].folder, ADAPTER_FILES)
    settings = replace(tiny.settings, expert=STILL, router=RouterSettings(initial=form))
    for index, (domain, bundle) in enumerate(zip(domains, bundles)):
        fresh = run_client(domain, tiny.seed, tiny.pool, tiny.embeddings, settings, tmp_path / f"fresh-{index}")
        same_files(bundle.folder, fresh, (ROUTING,))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(bundles[one].routing.vectors, bundles[other].routing.vectors)


@pytest.mark.parametrize("form", ["logistic", "moments"])
def test_routing_is_computed_again_when_the_pool_changes_that_the_expert_did_not_see(form, tiny, tmp_path):
    smaller = replace(tiny.pool, train=tiny.pool.train.select(range(60)))
    settings = replace(tiny.settings, proxy_aligned=False, router=RouterSettings(initial=form))

    def sent(pool, folder):
        embeddings = tiny.embeddings[:len(pool.train)]
        bundle = run_client(tiny.a, tiny.seed, pool, embeddings, settings, tmp_path / folder)
        return shutil.copytree(bundle, tmp_path / f"{folder}-{len(pool.train)}")
    full, less, fresh = sent(tiny.pool, "kept"), sent(smaller, "kept"), sent(smaller, "fresh")
    same_files(full, less, ADAPTER_FILES)
    same_files(less, fresh, FILES)
    vectors = [read_bundle(folder, tiny.seed).routing.vectors for folder in (full, less)]
    assert not torch.equal(*vectors) and len(kept(tmp_path / "kept", "routing")) == 2


PARTS = dict(relevance="relevance.npz", proxies=PROXIES, expert=ADAPTER_FILES[1], routing=ROUTING)


@pytest.mark.parametrize("kind", PARTS)
def test_damaged_stage_is_made_again_in_place_and_no_other(kind, client, tiny, tmp_path):
    [path] = kept(tmp_path / "a", kind)
    content, before = (path / PARTS[kind]).read_bytes(), stamps(tmp_path / "a")
    (path / PARTS[kind]).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    client()
    after = stamps(tmp_path / "a")
    assert (path / PARTS[kind]).read_bytes() == content
    assert after.keys() == before.keys() and {name for name in before if before[name] != after[name]} == {path.name}
    same_files(tmp_path / "a" / "bundle", tiny.work / "a" / "bundle", (*FILES, MANIFEST))


@pytest.mark.parametrize("where, left", [
    ("save_expert", ["embeddings", "proxies", "relevance"]),
    ("client_routing", ["embeddings", "expert", "proxies", "relevance"])])
def test_interrupted_stage_leaves_nothing_of_its_own_and_is_taken_up(where, left, tiny, tmp_path, monkeypatch):
    arguments = tiny.a, tiny.seed, tiny.pool, tiny.embeddings, tiny.settings, tmp_path / "a"

    def interrupted(*args, **kwargs): raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(harmomoe.unify, where, interrupted)
        with pytest.raises(KeyboardInterrupt): run_client(*arguments)
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "a").iterdir()) == left
    if "expert" in left: monkeypatch.setattr(harmomoe.unify, "train_expert", forbidden)
    run_client(*arguments)
    same_files(tmp_path / "a" / "bundle", tiny.work / "a" / "bundle", FILES)


@pytest.mark.parametrize("form", FORMS)
def test_expert_that_diverged_in_its_very_last_step_is_not_sent(form, tiny, tmp_path):
    one_step = Training(epochs=1, batch_size=1000, learning_rate=1e38)
    settings = replace(tiny.settings, expert=one_step, router=RouterSettings(initial=form))
    with pytest.raises(FloatingPointError, match="Lower the learning rate"):
        run_client(tiny.a, tiny.seed, tiny.pool, tiny.embeddings, settings, tmp_path)
    assert not kept(tmp_path, "routing") and not (tmp_path / "bundle").exists()


# ---- the server

@pytest.fixture(scope="module")
def unified(tiny):
    return unify(tiny.bundles, tiny.seed, tiny.pool, tiny.settings)


def test_unify_takes_bundles_seed_pool_and_settings_and_no_private_data():
    assert list(inspect.signature(unify).parameters) == ["bundles", "seed", "pool", "config", "workers", "progress"]


def test_unify_reports_losses_and_routing_before_and_after(unified, tiny):
    model, report = unified
    assert model.experts == ["seed", "a", "b", "c"] and model.ranks == [0, 4, 4, 4]
    assert len(report["losses"]) == tiny.settings.finetune.epochs and np.isfinite(report["losses"]).all()
    for routing in (report["before"], report["after"]):
        assert routing.experts == model.experts and routing.load.shape == (2, 4)
        assert np.allclose(routing.load.sum(1), 1) and ((routing.load >= 0) & (routing.load <= 1)).all()
        assert ((routing.entropy > 0) & (routing.entropy <= 1)).all()
        assert ((routing.weight > .25) & (routing.weight <= 1)).all()


def test_unify_repeats_bit_by_bit_elsewhere_with_nothing_left_of_the_clients_but_bundles(unified, tiny, tmp_path):
    "A second run from private data to model, in another folder; the clients' work is gone before the server starts."
    for domain in tiny.clients:
        folder = tmp_path / "work" / domain.name
        bundle = run_client(domain, tiny.seed, tiny.pool, tiny.embeddings, tiny.settings, folder)
        shutil.copytree(bundle, tmp_path / "inbox" / domain.name)
    shutil.rmtree(tmp_path / "work")
    bundles = [read_bundle(tmp_path / "inbox" / name, tiny.seed) for name in "abc"]
    model, _ = unify(bundles, tiny.seed, tiny.pool, tiny.settings)
    one, two = save_model(unified[0], tmp_path / "one"), save_model(model, tmp_path / "two")
    same_files(one, two, ("moe.safetensors", "moe.json", "seed/open_clip_model.safetensors"))


def test_another_seed_of_everything_random_gives_another_model(unified, tiny):
    model, _ = unify(tiny.bundles, tiny.seed, tiny.pool, replace(tiny.settings, rng=1))
    assert not same(weights(model.tower), weights(unified[0].tower))


def test_seeds_weights_are_in_the_model_unchanged(unified, tiny):
    model, ours = unified[0], weights(unified[0].tower)
    for name, value in weights(tiny.seed.tower).items():
        inside = name.replace(".mlp.", ".mlp.ffn.")
        assert torch.equal(ours[inside], value), name
    assert {name for name, p in model.tower.named_parameters() if p.requires_grad} == {
        f"{layer}.{name}" for layer in tiny.seed.layers
        for name in ("router.vectors", "router.blend", "a.c_fc", "a.c_proj", "b.c_fc", "b.c_proj")}


@pytest.mark.parametrize("form", FORMS)
def test_model_gives_an_image_the_same_embedding_in_every_batch(form, unite_with, tiny):
    data, model = tiny.a.test, unite_with(initial=form)
    finetune(model, tiny.pool.test, tiny.pool.classes, SHORT)
    tower = model.tower
    together = embed(tiny.seed, tower, data)
    for batch_size in (1, 5): assert close(embed(tiny.seed, tower, data, batch_size), together)
    assert close(embed(tiny.seed, tower, data.select(range(11, -1, -1))), together.flip(0))


EVERY = [dict(), dict(top_k=2), dict(top_k=4), dict(top_k=3, renormalise=True), dict(seed_expert=False),
         dict(shared_blend=True), dict(blend=1.), dict(blend=0., learn_blend=False), dict(initial="random"),
         dict(initial="logistic"), dict(initial="logistic", top_k=2, seed_expert=False, shared_blend=True),
         dict(initial="moments"), dict(initial="moments", top_k=2, seed_expert=False, blend=1.),
         dict(initial="moments", top_k=3, renormalise=True, shared_blend=True, learn_blend=False),
         dict(top_k=3, seed_expert=False, shared_blend=True)]
NAMES = [" ".join(f"{key}={value}" for key, value in settings.items()) or "default" for settings in EVERY]


@pytest.mark.parametrize("settings", EVERY, ids=NAMES)
def test_saved_model_comes_back_the_same_and_can_be_trained_on(settings, unite_with, tiny, tmp_path):
    model, data, pool = unite_with(**settings), tiny.pool.test, tiny.pool
    finetune(model, data, pool.classes, SHORT)
    save_model(model, tmp_path / "model", dict(from_="a test"))
    again = load_model(tmp_path / "model")
    for name in ("experts", "ranks", "scales", "settings"): assert getattr(again, name) == getattr(model, name)
    assert same(weights(again.tower), weights(model.tower)) and again.seed.identity == tiny.seed.identity
    assert torch.equal(embed(again.seed, again.tower, data), embed(tiny.seed, model.tower, data))
    assert again.parameter_groups() == model.parameter_groups()
    for one in (model, again): finetune(one, data, pool.classes, SHORT)
    assert same(weights(again.tower), weights(model.tower))


def training(model): return {name for name, module in model.tower.named_modules() if module.training}


@pytest.mark.parametrize("settings", [dict(), dict(initial="moments", top_k=2, shared_blend=True)], ids=str)
def test_every_part_of_a_model_is_ready_for_inference_when_it_is_made_and_when_it_is_loaded(settings, unite_with, tiny,
                                                                                            tmp_path):
    model, new = unite_with(**settings), new_model(tiny, **settings)
    assert len(list(model.tower.modules())) > 20 and training(model) == training(new) == set()
    assert training(new.start_experts(dropout=.5)) == set()
    assert new.tower.training is False and all(not layer.training for layer in new.layers)
    model.tower.train()                                       # as it was left has no part in what is loaded
    assert training(load_model(save_model(model, tmp_path / "model"))) == set()
    assert training(unite_with(**settings)) == set()          # nor in what is made of the same seed
    assert not any(module.training for module in tiny.seed.tower.modules())


def test_dropout_of_a_new_model_waits_for_training(unite_with, tiny):
    model = unite_with(top_k=2)
    before = embed(tiny.seed, model.tower, tiny.a.test)
    for layer in model.layers: layer.dropout = .5
    assert torch.equal(embed(tiny.seed, model.tower, tiny.a.test), before)
    model.tower.train()
    assert not close(embed(tiny.seed, model.tower, tiny.a.test), before)


@pytest.mark.parametrize("tokens", [(1, 1), (3, 5), (16, 9)], ids=str)
@pytest.mark.parametrize("settings", EVERY, ids=NAMES)
def test_layer_is_the_weighted_sum_of_dense_experts(settings, tokens, unite_with, tiny):
    model = unite_with(**settings)
    for layer in model.layers: layer.tile = 50                # so that many tokens, which go in groups, are several tiles
    z = torch.randn(*tokens, 64, generator=torch.Generator().manual_seed(0))
    for path, layer in zip(tiny.seed.layers, model.layers):
        ffns = [tiny.seed.tower.get_submodule(path)] * settings.get("seed_expert", True)
        ffns += [load_expert(tiny.seed, bundle.folder / "adapter").get_submodule(path) for bundle in tiny.bundles]
        (e, f), mixed, form = layer.router.vectors.tensor_split([64], 1), layer.router.blend, model.settings.form
        assert f.shape[1] == 64 * (form == "moments")
        logits = ((1 - mixed) * z + mixed * z.mean(1, keepdim=True)) @ e.T
        if form == "moments": logits = logits + mixed * (z.var(1, keepdim=True, correction=0) + 1e-6).sqrt() @ f.T
        if form != "mean": logits = logits + layer.router.biases
        pi = logits.softmax(-1)
        kept = pi >= pi.topk(model.settings.top_k, dim=-1).values[..., -1:]
        pi = torch.where(kept, pi, 0.)
        if model.settings.renormalise: pi = pi / pi.sum(-1, keepdim=True)
        with torch.no_grad(): expected = sum(pi[..., p, None] * ffn(z) for p, ffn in enumerate(ffns))
        assert close(layer(z), expected, 1e-4)


def test_only_one_expert_is_that_expert_and_only_the_seed_is_the_seed(unite_with, tiny):
    data = tiny.pool.test
    for top_k in (1, 3):
        model = unite_with(top_k=top_k)
        before = embed(tiny.seed, model.tower, data)
        for bundle in tiny.bundles:
            with model.only(bundle.client) as one:
                expected = dense(tiny.seed, bundle, data)
                assert close(embed(tiny.seed, one.tower, data), expected) and not close(expected, before)
        with model.only("seed"): assert close(embed(tiny.seed, model.tower, data), tiny.seed.embed(data))
        assert torch.equal(embed(tiny.seed, model.tower, data), before)


def test_only_is_undone_after_an_error_and_can_be_nested(unite_with, tiny):
    model = unite_with(top_k=2)
    with pytest.raises(KeyError), model.only("a", "b"):
        with model.only("c"): assert observe_routing(model, tiny.pool.test).load[:, 3].tolist() == [1, 1]
        load = observe_routing(model, tiny.pool.test).load
        assert (load[:, 1:3] > 0).all() and not load[:, [0, 3]].any()
        raise KeyError
    assert all(layer.router.active is None and layer.router.top_k == 2 for layer in model.layers)
    for names, said in ((("a", "d"), "no expert 'd'; this model has seed, a, b, c"), ((), "name at least one expert")):
        with pytest.raises(ValueError, match=said), model.only(*names): pass


def test_without_the_seed_expert_the_seed_gets_no_tokens(unite_with, tiny):
    model = unite_with(seed_expert=False)
    assert model.experts == ["a", "b", "c"]
    assert observe_routing(model, tiny.pool.test).load.shape == (2, 3)
    with pytest.raises(ValueError, match="no expert 'seed'"), model.only("seed"): pass


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_outside_the_number_of_experts_is_refused(top_k, unite_with):
    with pytest.raises(ValueError, match=f"top_k is {top_k}, but must be (1 to 4|at least 1)"): unite_with(top_k=top_k)
    with pytest.raises(ValueError, match="top_k is 4, but must be 1 to 3"): unite_with(top_k=4, seed_expert=False)


def test_every_token_gets_k_experts_and_renormalised_weights_sum_to_one(unite_with, tiny):
    for k in (1, 2, 3, 4):
        models = (unite_with(top_k=k, renormalise=value) for value in (False, True))
        plain, normed = (observe_routing(model, tiny.pool.test) for model in models)
        if k == 4: assert np.allclose(plain.load, normed.load)
        with torch.no_grad(): experts = unite_with(top_k=k).layers[0].router(torch.randn(3, 5, 64))[1]
        assert experts.shape == (3, 5, k) and all(len(set(chosen)) == k for chosen in experts.flatten(0, 1).tolist())
        assert np.allclose(normed.weight, 1)
        assert np.allclose(plain.weight, 1) == (k == 4)


def test_shared_blend_is_one_number_for_all_layers_also_after_training_and_loading(unite_with, tiny, tmp_path):
    model, pool = unite_with(shared_blend=True), tiny.pool
    apart = unite_with()
    finetune(model, pool.test, pool.classes, SHORT)
    finetune(apart, pool.test, pool.classes, SHORT)
    assert len({layer.router.blend.item() for layer in apart.layers}) == 2
    save_model(model, tmp_path / "model")
    for one in (model, load_model(tmp_path / "model")):
        first, second = (layer.router.blend for layer in one.layers)
        assert first is second and first.item() not in (pytest.approx(.3, abs=1e-9), 0, 1)
        assert first.item() == model.layers[0].router.blend.item()
    assert apart.parameter_groups()["routers"] - model.parameter_groups()["routers"] == 1


def test_shared_blend_of_zero_is_shared_too(unite_with):
    first, second = (layer.router.blend for layer in unite_with(shared_blend=True, blend=0.).layers)
    assert first is second


def test_routing_vectors_start_from_means_or_at_random_by_the_seed(unite_with, tiny, tiny_public):
    means = torch.stack([r.vectors for r in (tiny_public["mean"], *(bundle.routing for bundle in tiny.bundles))], 1)

    def start(**settings):
        return torch.stack([layer.router.vectors.detach() for layer in unite_with(**settings).layers])
    assert torch.equal(start(), means)
    random = start(initial="random", rng=1)
    assert torch.equal(random, start(initial="random", rng=1))
    assert not torch.equal(random, start(initial="random", rng=2))
    assert not torch.equal(random, means) and random.std().item() == pytest.approx(.02, rel=.3)


def test_experts_of_different_ranks_and_scales_keep_their_own(tiny, unite_with, tmp_path):
    changed = replace(tiny.settings, rank=2, alpha=6, expert=SHORT)
    small = read_bundle(run_client(tiny.a, tiny.seed, tiny.pool, tiny.embeddings, changed, tmp_path), tiny.seed)
    model, data = unite_with([tiny.bundles[1], small]), tiny.pool.test
    assert (model.experts, model.ranks, model.scales) == (["seed", "b", "a"], [0, 4, 2], [0., 2., 3.])
    for bundle in (small, tiny.bundles[1]):
        with model.only(bundle.client):
            assert close(embed(tiny.seed, model.tower, data), dense(tiny.seed, bundle, data))


def new_model(tiny, **settings):
    "Untrained experts of ranks 4 and 2 beside the seed's own FFN."
    return UnifiedModel(tiny.seed, ["seed", "a", "b"], [0, 4, 2], [0., 2., 1.], RouterSettings(**settings))


@pytest.mark.parametrize("settings", [dict(top_k=3), dict(renormalise=True), dict(top_k=2, renormalise=True)], ids=str)
def test_new_experts_leave_the_seeds_outputs_as_they_are(settings, tiny):
    "Where the weights of a token's experts sum to one."
    model = new_model(tiny, **settings)
    assert model.start_experts(dropout=.2, rng=5) is model and {layer.dropout for layer in model.layers} == {.2}
    assert close(embed(tiny.seed, model.tower, tiny.pool.test), tiny.seed.embed(tiny.pool.test))


def test_new_experts_start_as_in_lora_by_the_seed_alone_and_learn(tiny):
    torch.manual_seed(1)
    one, outer = new_model(tiny, top_k=3).start_experts(rng=5), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), outer)                  # the global generator is left alone
    assert same(weights(new_model(tiny, top_k=3).start_experts(rng=5).tower), weights(one.tower))
    other = new_model(tiny, top_k=3).start_experts(rng=6)
    drawn = [(a, layer.b[name]) for layer in one.layers for name, a in layer.a.items()]
    for (a, b), a2 in zip(drawn, [a for layer in other.layers for a in layer.a.values()]):
        bound = a.shape[1] ** -.5
        assert .9 * bound < a.abs().max() <= bound and a.std().item() == pytest.approx(bound / 3 ** .5, rel=.2)
        assert not b.any() and (a != a2).all()
    finetune(one, tiny.pool.test, tiny.pool.classes, SHORT)
    assert all(b.abs().sum(1).all() for _, b in drawn)


def test_layers_leave_low_rank_inputs_out_in_training_only(unite_with):
    layer, z = unite_with(top_k=2).layers[0], torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))

    def passes(dropout, mode):
        layer.dropout = dropout
        layer.train(mode)
        torch.manual_seed(0)
        with torch.no_grad(): return [layer(z) for _ in range(2)]
    still, _ = passes(0., False)
    for dropout, mode in ((0., True), (.5, False), (1., False)):
        assert all(torch.equal(y, still) for y in passes(dropout, mode))
    one, two = passes(.5, True)
    assert not close(one, two) and not close(one, still) and torch.equal(passes(.5, True)[0], one)
    with torch.no_grad():
        for b in layer.b.values(): b.zero_()
        bare = passes(0., False)[0]
    assert torch.equal(passes(.5, True)[0], bare)             # the shared FFN sees all
    assert not close(bare, still)


def test_active_parameters_are_those_of_the_largest_experts_that_a_token_can_choose(tiny):
    tower = sum(value.numel() for value in tiny.seed.tower.state_dict().values())
    line = sum(linear.in_features + linear.out_features for path in tiny.seed.layers for linear in (
        getattr(tiny.seed.tower.get_submodule(path), name) for name in tiny.seed.ffn.linears))
    for settings, routers in ((dict(), 2 * (3 * 64 + 1)), (dict(shared_blend=True), 2 * 3 * 64 + 1),
                              (dict(initial="logistic"), 2 * (3 * 65 + 1)),
                              (dict(initial="moments"), 2 * (3 * 129 + 1))):
        for top_k, rank in ((1, 4), (2, 6), (3, 6)):
            model = new_model(tiny, top_k=top_k, **settings)
            assert model.parameters() == dict(total=tower + 6 * line + routers, active=tower + rank * line + routers)
            assert model.parameters()["total"] == sum(p.numel() for p in model.tower.parameters())
    alone = UnifiedModel(tiny.seed, ["seed"], [0], [0.])
    assert alone.parameters() == dict(total=tower + 2 * 65, active=tower + 2 * 65)


@pytest.mark.parametrize("names", [(), ("a", "a"), ("seed", "b")])
def test_clients_need_different_names_other_than_seed(names, tiny, unite_with):
    with pytest.raises(ValueError, match="different names.*'seed'"):
        unite_with([replace(tiny.bundles[0], client=name) for name in names])


def test_one_client_alone_is_unified_too(tiny):
    model, _ = unify(tiny.bundles[:1], tiny.seed, tiny.pool, tiny.settings)
    assert model.experts == ["seed", "a"]


def test_fine_tuning_moves_routers_lambda_and_factors_and_nothing_else(unite_with, tiny):
    model, pool = unite_with(top_k=2), tiny.pool
    before = weights(model.tower)
    losses = finetune(model, pool.train, pool.classes, replace(SHORT, epochs=3))
    moved = {name for name, value in weights(model.tower).items() if not torch.equal(value, before[name])}
    assert moved == {name for name, p in model.tower.named_parameters() if p.requires_grad}
    assert len(moved) == 2 * 6 and losses[-1] < losses[0]


def test_routers_of_a_top_one_model_learn(unite_with, tiny):
    "With weights divided by their sum, the one weight would be 1 and the router would get no gradient."
    def moved(optimizer, **settings):
        model = unite_with(**settings)
        before = weights(model.tower)
        finetune(model, tiny.pool.test, tiny.pool.classes, replace(SHORT, optimizer=optimizer))
        after = weights(model.tower)
        return {not torch.equal(after[name], before[name]) for name in after if name.endswith("router.vectors")}
    for optimizer in ("sgd", "adamw"):
        assert moved(optimizer, top_k=1) == {True} and moved(optimizer, top_k=1, renormalise=True) == {False}


def test_model_with_a_number_that_is_not_finite_is_not_saved(unite_with, tmp_path):
    model = unite_with()
    with torch.no_grad(): model.layers[1].router.vectors[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="router.vectors of the unified model is not finite"):
        save_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_label_space_holds_names_that_differ_in_case_only_once():
    assert union_label_space(["Pug", "pug"], ["PUG", "cat"], ["Cat", "dog"]) == ["Pug", "pug", "cat", "dog"]


def test_fixed_lambda_stays_and_no_epochs_change_nothing(unite_with, tiny):
    fixed, still = unite_with(learn_blend=False), unite_with()
    before = weights(still.tower)
    finetune(fixed, tiny.pool.test, tiny.pool.classes, SHORT)
    assert {layer.router.blend.item() for layer in fixed.layers} == {torch.tensor(.3).item()}
    assert finetune(still, tiny.pool.test, tiny.pool.classes, replace(SHORT, epochs=0)) == []
    assert same(weights(still.tower), before)


def test_union_of_proxies_has_each_sample_once(tiny):
    union = proxy_union(tiny.bundles)
    assert union.tolist() == sorted(set().union(*(bundle.proxies.ids.tolist() for bundle in tiny.bundles)))


# ---- settings and data by name

POSITIVE = ("negatives", "candidates", "proxies", "rank", "alpha", "public_samples")


@pytest.mark.parametrize("wrong, said", [
    (dict(relevance="svm"), "relevance is 'svm', but must be one of probe, finetune"),
    (dict(selection="best"), "selection is 'best', but must be one of dpp, similarity, random"),
    *((dict(dropout=value), f"dropout is {value}") for value in (-.1, 1., 1.5)),
    (dict(candidates=10, proxies=11), "m = 11.*cannot exceed candidates.*n = 10"),
    (dict(proxy_aligned=False, private_training=False),
     "proxy_aligned and private_training both off, experts have nothing to train on"),
    *(({name: value}, f"{name} is {value}, but must be positive") for name in POSITIVE for value in (0, -1))])
def test_settings_are_checked(wrong, said):
    with pytest.raises(ValueError, match=said): Config(**wrong)
    with pytest.raises(ValueError, match=said): Config.embedded(**wrong)


def test_router_settings_are_checked_by_name():
    said = "'zero' is none of mean, logistic, moments, random"
    with pytest.raises(ValueError, match=said): RouterSettings(initial="zero")


@pytest.mark.parametrize("wrong", [dict(blend=1.5), dict(blend=-.1), dict(top_k=0), dict(top_k=-1)], ids=str)
def test_router_settings_are_checked_before_long_work(wrong):
    with pytest.raises(ValueError): RouterSettings(**wrong)


def test_fill_is_checked_before_long_work():
    with pytest.raises(ValueError): Config(fill="most")


def test_defaults_are_the_papers():
    paper = Config()
    assert (paper.candidates, paper.proxies, paper.negatives, paper.rank, paper.alpha) == (3000, 500, 10_000, 16, 32)
    assert paper.dropout == 0
    assert paper.expert == Training(10, 128, .01, "sgd", .9, 1e-4, 0)
    assert paper.finetune == Training(5, 128, .001, "sgd", .9, 1e-4, 0)
    assert paper.router == RouterSettings(1, True, .3, True, False, False, "mean")


def test_released_settings_are_the_authors_codes_where_they_differ_and_ours_elsewhere():
    for ours in (Config(), Config.embedded(), Config(rank=8, rng=3, router=RouterSettings(3, True, .7, False, True))):
        found = ours.released()
        wanted = dict(top_k=1, seed_expert=False, renormalise=True, initial="mean", blend=.3, shared_blend=False)
        assert found.router == replace(ours.router, **wanted)
        assert found == replace(ours, router=found.router, candidates=ours.candidates * 2 // 3)
        assert found.released() == replace(found, candidates=found.candidates * 2 // 3)
    assert Config().released().candidates == 2000
    for n, m, expected in ((700, 500, 500), (500, 500, 500), (751, 500, 500), (752, 500, 501)):
        assert Config(candidates=n, proxies=m).released().candidates == expected


def test_folder_of_domains_opens_and_clients_may_have_aliases(tiny_folder, tiny):
    found = open_benchmark(str(tiny_folder), "b, third=c", "pool")
    assert [client.name for client in found.clients] == ["b", "third"] and found.pool.name == "pool"
    assert found.clients[1].classes == tiny.c.classes


@pytest.mark.parametrize("clients, pool, said", [
    ("a,nope", "pool", "'nope' is not a domain there. Domains in .*: a, b, c, pool"), ("a", "", "name a pool"),
    ("a", "nope", "'nope' is not a domain there"), ("a,a", "pool", "used twice"), ("a,pool", "pool", "used twice")])
def test_wrong_names_in_a_folder_are_refused(clients, pool, said, tiny_folder):
    with pytest.raises((ValueError, FileNotFoundError), match=said): open_benchmark(str(tiny_folder), clients, pool)


def test_embedded_benchmark_gives_a_choice_of_its_clients_in_the_order_asked_for():
    assert [client.name for client in open_benchmark(clients="letters, flags").clients] == ["letters", "flags"]
    with pytest.raises(ValueError, match="no client 'pets' in data='embedded'; it has flags, digits, letters"):
        open_benchmark(clients="flags,pets")
    with pytest.raises(ValueError, match="has its own pool; leave out pool='icons'"): open_benchmark(pool="icons")


# ---- evaluation

def test_accuracy_counts_the_best_scored_class_over_the_given_classes(tiny):
    client = tiny.c
    classes = list(reversed(client.classes))
    images = torch.nn.functional.normalize(tiny.seed.embed(client.test), dim=1)
    score = images @ tiny.seed.label_features(tuple(classes)).T
    right = sum(classes[i] == name for i, name in zip(score.argmax(1).tolist(), labelled(client.test)["class_name"]))
    for batch_size in (256, 5):
        assert accuracy(Model(tiny.seed, tiny.seed.tower), client.test, classes, batch_size) == Accuracy(right, 12)


def test_accuracy_refuses_no_data_and_a_class_not_asked_for(tiny):
    data, classes = tiny.a.test, tiny.a.classes
    for data, classes, said in ((data.select([]), classes, "the data set is empty"),
                                (data, classes[1:], "not in the label space")):
        with pytest.raises(ValueError, match=said): accuracy(Model(tiny.seed, tiny.seed.tower), data, classes)


@pytest.mark.parametrize("correct, n", [(0, 1), (1, 1), (0, 50), (7, 12), (50, 50), (8577, 10_000)])
def test_interval_is_wilsons(correct, n):
    reference = binomtest(correct, n).proportion_ci(.95, "wilson")
    found = Accuracy(correct, n)
    assert found.interval == pytest.approx((100 * reference.low, 100 * reference.high), abs=1e-4)
    assert found.percent == pytest.approx(100 * correct / n)


def test_results_are_written_in_three_formats_that_agree(tmp_path):
    results = {"zeroshot": {"a": Accuracy(1, 4), "b": Accuracy(1, 3)},
               "harmomoe": {"a": Accuracy(4, 4), "b": Accuracy(2, 3)}}
    table = write_results(tmp_path, results, note="x")
    assert table.loc["zeroshot"].tolist() == pytest.approx([25, 100 / 3, (25 + 100 / 3) / 2])
    assert (tmp_path / "table.csv").read_text().split() == [
        "method,a,b,average", "zeroshot,25.0,33.33,29.17", "harmomoe,100.0,66.67,83.33"]
    assert (tmp_path / "table.md").read_text().splitlines()[2] == "| zeroshot | 25.00 | 33.33 | 29.17 |"
    told = json.loads((tmp_path / "table.json").read_text())
    assert told["note"] == "x" and told["accuracy"]["harmomoe"]["b"]["correct"] == 2
    assert told["accuracy"]["harmomoe"]["average"] == pytest.approx(250 / 3)
    with pytest.raises(ValueError, match="every method needs the same domains"):
        results_table(results | {"x": {"a": Accuracy(1, 1)}})


def test_throughput_compares_every_model_with_the_first(tiny):
    models = {"seed": Model(tiny.seed, tiny.seed.tower), "copy": Model(tiny.seed, tiny.seed.new_tower())}
    found = throughput(models, tiny.pool.test, tiny.pool.classes, rounds=3)
    assert found.index.tolist() == ["seed", "copy"] and found.loc["seed", "ratio"] == 1
    assert (found["samples/s"] > 0).all()
    assert (found["lowest"] <= found["ratio"]).all() and (found["ratio"] <= found["highest"]).all()
