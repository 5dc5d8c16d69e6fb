"""Every method on text: the contract that test_baselines.py has for images, in small, and what only texts have.

That is padding, which must change nothing, contexts that reach the past alone, and public samples that ask nothing."""
import shutil
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets

import harmomoe.unify
from harmomoe import choices
from harmomoe.baselines.compare import METHODS, find_method
from harmomoe.baselines.method import run_method
from harmomoe.baselines.models import Ensemble, load, save
from harmomoe.bundle import read_bundle
from harmomoe.core import digest_weights
from harmomoe.domains import load_benchmark
from harmomoe.evaluate import accuracy
from harmomoe.exchange import to_transformers
from harmomoe.experts import Training, train, train_expert, union_label_space
from harmomoe.finetune import observe_routing, proxy_union
from harmomoe.layer import RouterSettings
from harmomoe.moe import UnifiedModel
from harmomoe.relevance import fine_tuned_classifier
from harmomoe.routing import layer_means
from harmomoe.seed import Model, labelled
from harmomoe.unify import Config, run_client, select_stage, unify
from harmomoe.weights import open_seed
from test_baselines import PERSONAL, Watch, alike, members, private_parts

pytestmark = [pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning"),
              pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]
NAMES = [*METHODS, "expert:colours"]
every_method = pytest.mark.parametrize("name", NAMES)
CONTEXTS = [("sequence", "mean"), ("sequence", "logistic"), ("sequence", "moments"), ("prefix", "mean"),
            ("prefix", "logistic"), ("prompt", "mean"), ("prompt", "moments")]
every_context = pytest.mark.parametrize("context, initial", CONTEXTS)
LETTERS = ["A", "B", "C", "D"]


@pytest.fixture(scope="module")
def text(tiny_decoder, tiny_texts):
    "Seed, pool, clients, settings and the pool's embeddings; `data` has all test questions."
    seed, benchmark = open_seed(str(tiny_decoder)), load_benchmark(tiny_texts, "colours,animals", "sayings")
    short = Training(epochs=2, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.)
    settings = Config.text(candidates=40, proxies=12, public_samples=40, rank=4, alpha=8, expert=short, finetune=short)
    embeddings = seed.embed(benchmark.pool.train).numpy()
    data = concatenate_datasets([labelled(client.test) for client in benchmark.clients])
    return SimpleNamespace(seed=seed, benchmark=benchmark, pool=benchmark.pool, clients=benchmark.clients,
                           settings=settings, embeddings=embeddings, data=data)


@pytest.fixture(scope="module")
def rows(text):
    "A function (data set) -> the set of its texts as (domain, split, row); the pool is called so, whatever its name."
    def keys(dataset): return zip(dataset["prompt"], dataset["answer"])
    known = {key: ("pool" if domain is text.pool else domain.name, split, row)
             for domain in (text.pool, *text.clients) for split in ("train", "validation", "test")
             for row, key in enumerate(keys(getattr(domain, split)))}
    assert len(known) == sum(len(getattr(domain, split)) for domain in (text.pool, *text.clients)
                             for split in ("train", "validation", "test"))
    return lambda dataset: {known[key] for key in keys(dataset)}


@pytest.fixture(scope="module")
def play(text, rows, tmp_path_factory):
    "A function (name of a method, which time) -> a Watch; stages are shared as in a comparison."
    folders = {}
    public = replace(text.pool, name="pool")
    tiny = SimpleNamespace(seed=text.seed, pool=public, clients=text.clients, embeddings=text.embeddings)

    @lru_cache
    def run(name, time):
        folder = folders.setdefault(time, tmp_path_factory.mktemp("work"))
        return Watch(find_method(name), tiny, rows, text.settings, folder)
    return lambda name, time=1: run(name, time)


@pytest.fixture(scope="module")
def routed(text, tmp_path_factory):
    "A function (context, form of routing vectors) -> a unified model; experts are trained once."
    folder = tmp_path_factory.mktemp("routed")

    @lru_cache
    def build(context, initial):
        router = RouterSettings(context=context, initial=initial, blend=.5)
        return run_method(find_method("harmomoe"), text.benchmark, text.seed, text.embeddings,
                          replace(text.settings, router=router), folder)[0]
    return build


@pytest.fixture(scope="module")
def scores(text):
    "A function (model, rows, batch size) -> scores of these test questions, by name of the model."
    @torch.no_grad()
    def score(model, chosen=None, batch_size=100):
        data = text.data if chosen is None else text.data.select(chosen)
        batches = list(text.seed.batches(data, LETTERS, batch_size))
        return {name: torch.cat([own.scorer(LETTERS)(batch) for batch in batches])
                for name, own in members(model).items()}
    return score


def close(one, two, atol=1e-4):
    return one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=atol) for name in one)


# ---- every method

@every_method
def test_method_builds_a_model_that_answers_every_question(name, play, scores, text):
    played = play(name)
    assert list(members(played.model)) == ([c.name for c in text.clients] if name in PERSONAL else ["all"])
    for found in scores(played.model).values():
        assert found.shape == (24, 4) and torch.isfinite(found[:, :3]).all()
        assert (found[:12, 3] == -torch.inf).all() and torch.isfinite(found[12:]).all()    # colours have three choices
    for client in text.clients:
        model = played.model[client.name] if name in PERSONAL else played.model
        assert accuracy(model, client.test, client.classes).n == 12
    assert played.report["bytes"] >= 0 and np.isfinite(played.report.get("losses", [])).all()


@every_method
def test_no_method_changes_the_seed_and_all_but_one_leave_it(name, play, scores, text):
    played = play(name)
    fresh = open_seed(str(text.seed.model.config._name_or_path))
    assert digest_weights(text.seed.model) == digest_weights(fresh.model) and text.seed.identity == fresh.identity
    own = scores(Model(text.seed, text.seed.tower))
    changed = {who: not torch.allclose(found.softmax(-1), own["all"].softmax(-1), atol=1e-3)
               for who, found in scores(played.model).items()}
    assert set(changed.values()) == {name != "zeroshot"}


@every_method
def test_same_settings_give_the_same_model(name, play, scores):
    one, two = play(name), play(name, time=2)
    assert alike(scores(one.model), scores(two.model))
    assert one.report["bytes"] == two.report["bytes"] and one.report.get("losses") == two.report.get("losses")


@every_method
def test_saved_model_comes_back_the_same(name, play, scores, tmp_path):
    model = play(name).model
    folder = save(model, tmp_path / "saved")
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    loaded = load(copy)
    assert type(loaded) is type(model) and alike(scores(loaded), scores(model))
    assert {who: own.parameters() for who, own in members(loaded).items()} == {
        who: own.parameters() for who, own in members(model).items()}


@every_method
def test_answer_does_not_depend_on_what_else_is_asked(name, play, scores):
    model, order = play(name).model, np.random.default_rng(0).permutation(24)
    together = scores(model)
    for batch_size in (1, 5):
        assert close(scores(model, order, batch_size), {who: found[order] for who, found in together.items()})


@every_method
def test_server_gets_nothing_that_leads_to_private_texts(name, play, rows, text):
    played = play(name)
    if played.method.needs == "data":
        assert played.received == text.clients
        return
    if played.method.needs == "rounds":
        shown = [value for one in played.received for part, value in vars(one).items() if part[0] != "_"]
        assert private_parts(shown, rows) == []
        return
    led_to = [thing for thing in played.led_to if not isinstance(thing, Dataset) or len(thing)]  # the pool has no test
    assert private_parts(led_to, rows) == [] and played.remained == []
    assert {domain for domain, *_ in played.looked["server"]} <= {"pool"}


@every_method
def test_client_looks_at_its_own_texts_and_public_ones(name, play):
    played = play(name)
    for client in {"colours", "animals"} & played.looked.keys():
        assert {(domain, split) for domain, split, _ in played.looked[client]} <= {
            ("pool", "train"), (client, "train"), *([(client, "validation")] if name == "comigs" else [])}


def test_ensemble_of_letters_is_the_mean_of_its_members_answers(play, text, scores):
    ensemble = play("btm").model
    assert type(ensemble) is Ensemble
    parts = []
    with torch.no_grad():
        [batch] = text.seed.batches(text.data, LETTERS, 100)
        for tower in ensemble.towers: parts.append(text.seed.scorer(LETTERS)(tower, batch).double().softmax(-1))
    assert torch.allclose(scores(ensemble)["all"].double().exp(), torch.stack(parts).mean(0), atol=1e-6)


@pytest.mark.parametrize("name", ["btx", "flexolmo"])
def test_system_that_routes_by_single_tokens_generates_with_a_cache(name, play):
    model, ids = to_transformers(play(name).model), torch.arange(40, 52)[None]
    cached, whole = (model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                                    use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, whole) and cached.shape[1] > ids.shape[1]


@pytest.mark.parametrize("reading", [dict(scoring="text", loss_on="all"), dict(dtype=torch.bfloat16),
                                     dict(max_length=40)], ids=str)
@pytest.mark.parametrize("name", ["btm", "harmomoe"])
def test_other_ways_to_read_a_text_go_through_all_stages(reading, name, text, tiny_decoder, tmp_path):
    seed = open_seed(str(tiny_decoder), **reading)
    short = replace(text.settings.expert, epochs=1)
    settings = replace(text.settings, expert=short, finetune=short)
    embeddings = seed.embed(text.pool.train).numpy()
    model, _ = run_method(find_method(name), text.benchmark, seed, embeddings, settings, tmp_path / "work")
    again = load(save(model, tmp_path / "saved"))
    own, theirs = again.seed.identity, seed.identity
    assert all(own[part] == theirs[part] for part in ("architecture", "preprocessing", "prompt"))
    assert (own["weights"] == theirs["weights"]) == (name == "harmomoe")               # a dense model is its own seed
    [batch] = seed.batches(text.data, LETTERS, 100)
    with torch.no_grad(): found, wanted = (one.scorer(LETTERS)(batch) for one in (again, model))
    assert torch.equal(found, wanted) and torch.isfinite(found[:, :3]).all() and found.dtype == torch.float32


# ---- proxies are instructions

def test_experts_train_on_private_questions_and_public_instructions(text, rows, tmp_path, monkeypatch):
    seen = []

    def spy(seed, private, proxies, *others):
        seen.append((private, proxies))
        return train_expert(seed, private, proxies, *others)
    monkeypatch.setattr(harmomoe.unify, "train_expert", spy)
    client = text.clients[0]
    folder = run_client(client, text.seed, text.pool, text.embeddings, text.settings, tmp_path)
    bundle, [(private, proxies)] = read_bundle(folder, text.seed), seen
    assert rows(private) == rows(client.train) == {("colours", "train", row) for row in range(32)}
    assert rows(proxies) == {("pool", "train", row) for row in bundle.proxies.ids.tolist()} and len(proxies) == 12
    assert all(not row["choices"] and row["prompt"].endswith("### Response:") for row in proxies)
    with pytest.raises(ValueError, match="seed"): read_bundle(folder, open_seed(str(
        text.seed.model.config._name_or_path), scoring="text"))


def test_fine_tuning_reads_nothing_but_the_proxies(play, rows, text):
    played = play("harmomoe")
    union = rows(text.pool.train.select(proxy_union(played.received)))
    assert union <= played.looked["server"] and len(played.report["losses"]) == 2
    assert played.report["losses"][1] < played.report["losses"][0]


def test_whole_seed_as_classifier_tells_questions_from_instructions(text, tmp_path):
    client, before = text.clients[0], digest_weights(text.seed.model)
    pool = text.pool.train
    one, two = (fine_tuned_classifier(text.seed, client.train, pool, epochs=4, learning_rate=1e-3, batch_size=16)
                for _ in range(2))
    assert one.scores.shape == (90,) and one.private.shape == (32,) and ((one.scores >= 0) & (one.scores <= 1)).all()
    assert np.array_equal(one.scores, two.scores) and one.facts == two.facts
    assert one.facts["auc"] > .9 and one.private.mean() > .5 > one.scores.mean()
    assert digest_weights(text.seed.model) == before
    settings = replace(text.settings, relevance="finetune")
    proxies, relevance = select_stage(client, text.seed, pool, text.embeddings, settings, tmp_path)
    assert relevance.facts["method"] == "finetune" and len(proxies) == 12


# ---- routing by context

@every_context
def test_context_gives_a_model_that_answers_alone_as_in_company(context, initial, routed, scores, tmp_path):
    model = routed(context, initial)
    assert isinstance(model, UnifiedModel) and model.settings.context == context and model.settings.initial == initial
    together = scores(model)
    assert torch.isfinite(together["all"][:, :3]).all()
    assert close(scores(model, batch_size=1), together) and close(scores(model, range(23, -1, -1), 7), {
        "all": together["all"].flip(0)})
    assert alike(scores(load(save(model, tmp_path / "saved"))), together)


@every_context
def test_choices_that_share_a_prompt_score_as_each_does_from_its_beginning(context, initial, routed, text, monkeypatch):
    tower, batch = routed(context, initial).tower, next(iter(text.seed.batches(text.data, LETTERS, 8)))
    reached = tower.base_model.context_reach
    with torch.no_grad():
        monkeypatch.setattr(choices, "_continued" if context == "sequence" else "_from_the_beginning", None)
        found = choices.choice_scores(text.seed, tower, batch["choices"], len(LETTERS), reached)
        monkeypatch.undo()
        expected = choices.choice_scores(text.seed, tower, batch["choices"], len(LETTERS), "sequence")
    assert reached == context and torch.allclose(found, expected, atol=1e-4)


def test_contexts_are_not_the_same(routed, scores):
    found = [scores(routed(*pair))["all"] for pair in CONTEXTS]
    for one, two in combinations(range(len(CONTEXTS)), 2):
        assert not torch.allclose(found[one], found[two], atol=1e-4), (CONTEXTS[one], CONTEXTS[two])


@every_context
def test_only_with_the_prefix_a_token_does_not_know_what_follows(context, initial, routed, text):
    model, mask = routed(context, initial), torch.ones(1, 20, dtype=torch.long)
    ids = torch.arange(20)[None] + 40
    other = torch.cat([ids[:, :12], ids[:, 12:].flip(1)], 1)
    with torch.no_grad(): one, two = (model.tower(input_ids=x, attention_mask=mask).logits[0] for x in (ids, other))
    assert torch.allclose(one[:12], two[:12], atol=1e-5) == (context == "prefix")
    assert not torch.allclose(one[12:], two[12:], atol=1e-2)


@every_context
def test_observed_routing_counts_real_tokens_only(context, initial, routed, text):
    "In batches of one there is no padding."
    model = routed(context, initial)
    lengths = {len(batch["input_ids"][0]) for batch in text.seed.batches(text.data, batch_size=1)}
    assert len(lengths) > 3
    one, all_ = (observe_routing(model, text.data, batch_size=size) for size in (1, 100))
    for part in ("load", "entropy", "weight"):
        assert np.allclose(getattr(one, part), getattr(all_, part), atol=1e-5), part
    assert np.allclose(one.load.sum(1), 1) and one.load.shape == (2, 3)


@pytest.mark.parametrize("spread", [False, True])
def test_means_that_describe_a_domain_leave_padding_out(spread, routed, text):
    for tower in (text.seed.tower, routed("sequence", "mean").tower):
        one, all_ = (layer_means(text.seed, tower, text.data, batch_size=size, spread=spread) for size in (1, 100))
        assert torch.allclose(one, all_, atol=1e-5)


# ---- training with padding

def steps(seed, tower, data, together):
    "What one step of SGD changes, for the samples together and as the mean of each alone; parameter -> change."
    once = Training(epochs=1, batch_size=len(data), learning_rate=1., optimizer="sgd", momentum=0., weight_decay=0.)
    start = {name: p.detach().clone() for name, p in tower.named_parameters() if p.requires_grad}
    parts = [data] if together else [data.select([row]) for row in range(len(data))]
    changes = {name: torch.zeros_like(p) for name, p in start.items()}
    for part in parts:
        train(seed, tower, part, union_label_space(LETTERS, ["text"]), once)
        with torch.no_grad():
            for name, p in tower.named_parameters():
                if name in start:
                    changes[name] += (p - start[name]) / len(parts)
                    p.copy_(start[name])
    return changes


@pytest.mark.parametrize("loss_on", ["answer", "all"])
@pytest.mark.parametrize("which", ["expert", *CONTEXTS], ids=str)
def test_gradient_of_padded_samples_is_the_mean_of_theirs_alone(which, loss_on, text, routed, tiny_decoder):
    seed = open_seed(str(tiny_decoder), loss_on=loss_on)
    parts = text.clients[0].train.select([0, 2]), text.pool.train.select([4, 5])
    data = concatenate_datasets([*map(labelled, parts)])
    assert len({len(batch["input_ids"][0]) for batch in seed.batches(data, batch_size=1)}) == 4
    if which == "expert": tower = train_expert(seed, data, None, [*LETTERS, "text"], text.settings.expert, 4, 8)[0]
    else: tower = routed(*which).tower
    together, alone = (steps(seed, tower, data, flag) for flag in (True, False))
    largest = max(change.abs().max() for change in together.values())
    assert largest > 1e-2
    for name, change in together.items():
        assert torch.allclose(change, alone[name], atol=1e-4 * largest), name
        assert change.any() or "blend" in name, name


def test_unify_is_the_method(play, text, scores):
    model, report = unify(play("harmomoe").received, text.seed, text.pool, text.settings)
    assert alike(scores(model), scores(play("harmomoe").model))
    assert report["losses"] == play("harmomoe").report["losses"]
