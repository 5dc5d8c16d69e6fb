"""Every method on text: the contract of test_methods.py, in small, and what only texts have.

That is padding, which must change nothing, contexts that reach the past alone, and public samples
that ask nothing."""

import shutil
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import concatenate_datasets
from watching import PERSONAL, Watch, alike, members, private_parts

from harmomoe.base.artefacts import digest_weights
from harmomoe.baselines.method import AllData, Rounds, harmomoe
from harmomoe.baselines.methods import METHODS, find_method
from harmomoe.bundle.files import read_bundle
from harmomoe.client.client import Client
from harmomoe.client.expert import train_expert
from harmomoe.config.settings import changed, preset
from harmomoe.data.domains import load_benchmark
from harmomoe.data.samples import labelled
from harmomoe.describe.public import Public
from harmomoe.describe.relevance import CLASSIFIER, fine_tuned_classifier
from harmomoe.describe.routing import layer_means
from harmomoe.exchange.transformers import to_transformers
from harmomoe.models import decoder
from harmomoe.models.ensemble import Ensemble
from harmomoe.models.evaluate import measure
from harmomoe.models.model import Model, load_model
from harmomoe.models.observe import observe_routing
from harmomoe.models.training import Training, train
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed
from harmomoe.moe.router import RouterSettings
from harmomoe.server.finetune import proxy_union
from harmomoe.server.server import unify

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]
every_method = pytest.mark.parametrize("name", METHODS)
CONTEXTS = [
    ("sequence", "mean"),
    ("sequence", "logistic"),
    ("sequence", "moments"),
    ("prefix", "mean"),
    ("prefix", "logistic"),
    ("prompt", "mean"),
    ("prompt", "moments"),
]
every_context = pytest.mark.parametrize("context, form", CONTEXTS)
LETTERS = ["A", "B", "C", "D"]
HOW = dict(epochs=2, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.0)
SHORT = {
    "proxies": dict(candidates=40, number=12),
    "routing.public_samples": 40,
    "expert": dict(HOW, warmup_steps=0, rank=4, alpha=8),
    "finetune": HOW,
}


@pytest.fixture(scope="module")
def text(tiny_decoder, tiny_texts, tmp_path_factory):
    "What everybody has, and the clients' data; `data` has all test questions."
    benchmark = load_benchmark(tiny_texts, "colours,animals", "sayings")
    seed, config = open_seed(str(tiny_decoder)), changed(preset("text"), SHORT)
    pool, folder = replace(benchmark.pool, name="pool"), tmp_path_factory.mktemp("public")
    data = concatenate_datasets([labelled(client.test) for client in benchmark.clients])
    public = Public(seed, pool, config, folder)
    return SimpleNamespace(
        public=public, seed=seed, pool=pool, clients=benchmark.clients, config=config, data=data
    )


@pytest.fixture(scope="module")
def rows(text):
    "A function (data set) -> the set of its texts as (domain, split, row)."

    def keys(dataset):
        return zip(dataset["prompt"], dataset["answer"])

    texts = [
        (key, (domain.name, split, row))
        for domain in (text.pool, *text.clients)
        for split in ("train", "validation", "test")
        for row, key in enumerate(keys(getattr(domain, split)))
    ]
    known = dict(texts)
    assert len(known) == len(texts)
    return lambda dataset: {known[key] for key in keys(dataset)}


@pytest.fixture(scope="module")
def play(text, rows, tmp_path_factory):
    """A function (name of a method) -> a Watch. Methods share what clients computed, as in a
    comparison; what is public each computes anew."""
    folder = tmp_path_factory.mktemp("work")

    @lru_cache
    def run(name):
        public = replace(text.public, folder=tmp_path_factory.mktemp("public"))
        return Watch(find_method(name), public, text.clients, rows, folder)

    return run


@pytest.fixture(scope="module")
def routed(text, play):
    "A function (context, form of routing vectors) -> a unified model; experts are trained once."
    folder = play("harmomoe").work

    @lru_cache
    def build(context, form):
        router = RouterSettings(context=context, form=form, lam=0.5)
        public = text.public.with_config(replace(text.config, router=router))
        return harmomoe.run(public, text.clients, folder)[0]

    return build


@pytest.fixture(scope="module")
def scores(text):
    "A function (model, rows, batch size) -> scores of these test questions, by name of the model."

    @torch.no_grad()
    def score(model, chosen=None, batch_size=100):
        data = text.data if chosen is None else text.data.select(chosen)
        batches = list(text.seed.batches(data, LETTERS, batch_size))
        return {
            name: torch.cat([own.scorer(LETTERS)(batch) for batch in batches])
            for name, own in members(model).items()
        }

    return score


def close(one, two, atol=1e-4):
    near = lambda name: torch.allclose(one[name], two[name], atol=atol)
    return one.keys() == two.keys() and all(map(near, one))


# ---- every method


@every_method
def test_method_builds_a_model_that_answers_every_question(name, play, scores, text):
    played = play(name)
    wanted = [client.name for client in text.clients] if name in PERSONAL else ["all"]
    assert list(members(played.model)) == wanted
    for found in scores(played.model).values():
        assert found.shape == (24, 4) and torch.isfinite(found[:, :3]).all()
        # colours have three choices
        assert (found[:12, 3] == -torch.inf).all() and torch.isfinite(found[12:]).all()
    for client in text.clients:
        model = played.model.for_domain(client.name)
        assert measure(model, client.test, client.classes).n == 12
    assert played.bytes >= 0 and np.isfinite(played.model.losses).all()


@every_method
def test_no_method_changes_the_seed(name, play, tiny_decoder):
    assert play(name).seed == digest_weights(open_seed(str(tiny_decoder)).whole)


@every_method
def test_all_methods_but_one_leave_the_seed(name, play, scores, text):
    own = scores(Model(text.seed, text.seed.backbone))["all"].softmax(-1)
    for found in scores(play(name).model).values():
        assert torch.allclose(found.softmax(-1), own, atol=1e-3) == (name == "zeroshot")


@every_method
def test_from_the_same_the_server_makes_the_same_model(name, play, scores, text):
    played = play(name)
    again = played.again(text.clients)
    assert alike(scores(again), scores(played.model)) and again.losses == played.model.losses


@pytest.mark.parametrize("name", ["harmomoe", "flexolmo"])
def test_from_the_same_texts_clients_make_the_same_bundles(name, play, text, tmp_path):
    "In a folder of their own, where nothing has been computed."
    played = play(name)
    public = replace(played.public, folder=tmp_path / "public")
    [found] = played.method.receive(public, text.clients[1:], tmp_path / "work")
    client = played.method.client(public, text.clients[1], played.work / "animals")
    wanted = read_bundle(client.bundle(tmp_path / "bundle"), public)
    assert found.manifest == wanted.manifest  # which has the digests of all files


@every_method
def test_saved_model_comes_back_the_same(name, play, scores, tmp_path):
    model = play(name).model
    folder = model.save(tmp_path / "saved")
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    loaded = load_model(copy)
    assert type(loaded) is type(model) and alike(scores(loaded), scores(model))
    counts = [{w: m.count_parameters() for w, m in members(x).items()} for x in (loaded, model)]
    assert counts[0] == counts[1]


@every_method
def test_answer_does_not_depend_on_what_else_is_asked(name, play, scores):
    model, order = play(name).model, np.random.default_rng(0).permutation(24)
    wanted = {who: found[order] for who, found in scores(model).items()}
    for batch_size in (1, 5):
        assert close(scores(model, order, batch_size), wanted)


@every_method
def test_server_gets_nothing_that_leads_to_private_texts(name, play, rows, text):
    played = play(name)
    if isinstance(played.method, AllData):
        assert [client.domain for client in played.received] == text.clients
        return
    if isinstance(played.method, Rounds):
        own = [vars(one).items() for one in played.received]
        shown = [value for one in own for part, value in one if part[0] != "_"]
        assert private_parts(shown, rows) == []
        return
    assert private_parts(played.led_to, rows) == [] and played.remained == []
    assert {domain for domain, *_ in played.looked["server"]} <= {"pool"}


@every_method
def test_client_looks_at_its_own_texts_and_public_ones(name, play):
    played, splits = play(name), ("train", "validation") if name == "comigs" else ("train",)
    for client in {"colours", "animals"} & played.looked.keys():
        own = {("pool", "train"), *((client, split) for split in splits)}
        assert {(domain, split) for domain, split, _ in played.looked[client]} <= own


def test_ensemble_of_letters_is_the_mean_of_its_members_answers(play, text, scores):
    ensemble = play("btm").model
    assert type(ensemble) is Ensemble
    [batch] = text.seed.batches(text.data, LETTERS, 100)
    task, parts = text.seed.task(LETTERS), []
    with torch.no_grad():
        for backbone in ensemble.backbones:
            parts.append(task.scores(backbone, batch).double().softmax(-1))
    found = scores(ensemble)["all"].double().exp()
    assert torch.allclose(found, torch.stack(parts).mean(0), atol=1e-6)


@pytest.mark.parametrize("name", ["btx", "flexolmo"])
def test_system_that_routes_by_single_tokens_generates_with_a_cache(name, play):
    model, ids = to_transformers(play(name).model), torch.arange(40, 52)[None]
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    cached, whole = (model.generate(ids, use_cache=cache, **given) for cache in (True, False))
    assert torch.equal(cached, whole) and cached.shape[1] > ids.shape[1]


@pytest.mark.parametrize(
    "reading",
    [dict(scoring="text", loss_on="all"), dict(dtype=torch.bfloat16), dict(max_length=40)],
    ids=str,
)
def test_other_ways_to_read_a_text_go_through_all_stages(reading, text, tiny_decoder, tmp_path):
    seed = open_seed(str(tiny_decoder), **reading)
    config = changed(text.config, {"expert.epochs": 1, "finetune.epochs": 1})
    public = Public(seed, text.pool, config, tmp_path / "public")
    [batch] = seed.batches(text.data, LETTERS, 100)
    for name in ("btm", "harmomoe"):
        model, _ = find_method(name).run(public, text.clients, tmp_path / "clients")
        again = load_model(model.save(tmp_path / name))
        own, theirs = again.seed.identity, seed.identity
        for part in ("architecture", "preprocessing", "prompt"):
            assert own[part] == theirs[part]
        # a dense model is its own seed
        assert (own["weights"] == theirs["weights"]) == (name == "harmomoe")
        with torch.no_grad():
            found, wanted = (one.scorer(LETTERS)(batch) for one in (again, model))
        assert torch.equal(found, wanted) and found.dtype == torch.float32
        assert torch.isfinite(found[:, :3]).all()


# ---- proxies are instructions


def test_experts_train_on_private_questions_and_public_instructions(text, rows, play, tmp_path):
    played = play("harmomoe")
    client = Client(played.public, text.clients[0], played.work / "colours")
    private, proxies = client.training_data
    bundle = read_bundle(client.bundle(tmp_path / "bundle"), played.public)
    assert rows(private) == {("colours", "train", row) for row in range(32)}
    assert rows(proxies) == {("pool", "train", row) for row in bundle.ids.tolist()}
    assert len(proxies) == 12
    assert all(not row["choices"] and row["prompt"].endswith("### Response:") for row in proxies)
    other = open_seed(str(text.seed.model.config._name_or_path), scoring="text")
    with pytest.raises(ValueError, match="seed"):
        read_bundle(bundle.folder, replace(text.public, seed=other))


def test_fine_tuning_reads_nothing_but_the_proxies(play, rows, text):
    played = play("harmomoe")
    union, losses = rows(proxy_union(played.received, text.public)), played.model.losses
    assert played.looked["server"] == union | rows(text.public.sample)  # e_0 is the sample's mean
    assert len(losses) == 2 and losses[1] < losses[0]


def test_whole_seed_as_classifier_tells_questions_from_instructions(text, tmp_path):
    domain, before = text.clients[0], digest_weights(text.seed.model)
    how = replace(CLASSIFIER, epochs=4, learning_rate=1e-3, batch_size=16)
    given = text.seed, domain.train, text.pool.train
    one, two = (fine_tuned_classifier(*given, training=how) for _ in range(2))
    assert one.scores.shape == (88,) and one.private.shape == (32,)
    assert ((one.scores >= 0) & (one.scores <= 1)).all()
    assert np.array_equal(one.scores, two.scores) and one.facts == two.facts
    assert one.facts["auc"] > 0.9 and one.private.mean() > 0.5 > one.scores.mean()
    assert digest_weights(text.seed.model) == before
    public = text.public.with_config(changed(text.config, {"relevance.method": "finetune"}))
    client = Client(public, domain, tmp_path)
    assert len(client.proxies) == 12 and client.relevance.facts["method"] == "finetune"


# ---- routing by context


@every_context
def test_context_gives_a_model_that_answers_alone_as_in_company(
    context, form, routed, scores, tmp_path
):
    model = routed(context, form)
    assert isinstance(model, UnifiedModel)
    assert (model.settings.context, model.settings.form) == (context, form)
    together = scores(model)
    assert torch.isfinite(together["all"][:, :3]).all()
    assert close(scores(model, batch_size=1), together)
    assert close(scores(model, range(23, -1, -1), 7), {"all": together["all"].flip(0)})
    assert alike(scores(load_model(model.save(tmp_path / "saved"))), together)


@every_context
def test_choices_that_share_a_prompt_score_as_each_does_from_its_beginning(
    context, form, routed, text, monkeypatch
):
    backbone, task = routed(context, form).backbone, text.seed.task(LETTERS)
    batch, reached = next(iter(text.seed.batches(text.data, LETTERS, 8))), decoder._reach(backbone)
    other = "_continued" if context == "sequence" else "_from_the_beginning"
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(decoder, other, None)
            found = task.by_text(backbone, batch)
        flat = lambda questions: [answer for answers in questions for answer in answers]
        again = lambda *given: decoder._from_the_beginning(*given[:2], flat(given[2]))
        monkeypatch.setattr(decoder, "_continued", again)
        wanted = task.by_text(backbone, batch)
    assert reached == context and torch.allclose(found, wanted, atol=1e-4)


def test_contexts_are_not_the_same(routed, scores):
    found = {pair: scores(routed(*pair))["all"] for pair in CONTEXTS}
    for one, two in combinations(found, 2):
        assert not torch.allclose(found[one], found[two], atol=1e-4), (one, two)


@every_context
def test_only_with_the_prefix_a_token_does_not_know_what_follows(context, form, routed):
    model, mask = routed(context, form), torch.ones(1, 20, dtype=torch.long)
    ids = torch.arange(20)[None] + 40
    other = torch.cat([ids[:, :12], ids[:, 12:].flip(1)], 1)
    with torch.no_grad():
        how = dict(prompt_mask=mask) if context == "prompt" else {}
        ask = lambda ids: model.backbone(input_ids=ids, attention_mask=mask, **how).logits[0]
        one, two = ask(ids), ask(other)
    assert torch.allclose(one[:12], two[:12], atol=1e-5) == (context == "prefix")
    assert not torch.allclose(one[12:], two[12:], atol=1e-2)


@every_context
def test_observed_routing_counts_real_tokens_only(context, form, routed, text):
    "In batches of one there is no padding."
    model = routed(context, form)
    lengths = {len(batch["input_ids"][0]) for batch in text.seed.batches(text.data, batch_size=1)}
    assert len(lengths) > 3
    one, all_ = (observe_routing(model, text.data, batch_size=size) for size in (1, 100))
    for part in ("load", "entropy", "weight"):
        assert np.allclose(getattr(one, part), getattr(all_, part), atol=1e-5), part
    assert np.allclose(one.load.sum(1), 1) and one.load.shape == (2, 3)


@pytest.mark.parametrize("spread", [False, True])
def test_means_that_describe_a_domain_leave_padding_out(spread, routed, text):
    seed = text.seed
    for backbone in (seed.backbone, routed("sequence", "mean").backbone):
        alone, together = (
            layer_means(seed, backbone, text.data, batch_size=size, spread=spread)
            for size in (1, 100)
        )
        assert torch.allclose(alone, together, atol=1e-5)


# ---- training with padding


def steps(seed, backbone, data, together):
    """What one step of SGD changes, for the samples together and as the mean of each alone;
    parameter -> change."""
    plain = dict(learning_rate=1.0, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    once, space = Training(epochs=1, batch_size=len(data), **plain), [*LETTERS, "text"]
    start = {name: p.detach().clone() for name, p in backbone.named_parameters() if p.requires_grad}
    parts = [data] if together else [data.select([row]) for row in range(len(data))]
    changes = {name: torch.zeros_like(p) for name, p in start.items()}
    for part in parts:
        train(seed, backbone, part, space, once)
        with torch.no_grad():
            for name, p in backbone.named_parameters():
                if name in start:
                    changes[name] += (p - start[name]) / len(parts)
                    p.copy_(start[name])
    return changes


@pytest.mark.parametrize("loss_on", ["answer", "all"])
@pytest.mark.parametrize("which", ["expert", *CONTEXTS], ids=str)
def test_gradient_of_padded_samples_is_the_mean_of_theirs_alone(
    which, loss_on, text, routed, tiny_decoder
):
    seed = open_seed(str(tiny_decoder), loss_on=loss_on)
    parts = text.clients[0].train.select([0, 2]), text.pool.train.select([4, 5])
    data = concatenate_datasets([*map(labelled, parts)])
    assert len({len(batch["input_ids"][0]) for batch in seed.batches(data, batch_size=1)}) == 4
    if which == "expert":
        backbone = train_expert(seed, data, [*LETTERS, "text"], text.config.expert)[0]
    else:
        backbone = routed(*which).backbone
    together, alone = (steps(seed, backbone, data, flag) for flag in (True, False))
    largest = max(change.abs().max() for change in together.values())
    assert largest > 1e-2
    for name, change in together.items():
        assert torch.allclose(change, alone[name], atol=1e-4 * largest), name
        assert change.any() or "lam" in name, name


def test_unify_is_the_method(play, scores):
    played = play("harmomoe")
    model = unify(played.received, played.public)
    assert alike(scores(model), scores(played.model)) and model.losses == played.model.losses
