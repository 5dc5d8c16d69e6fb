"""Every method that is compared keeps one contract; then what is particular to each, and how tables are made.

Each method is played once, from private data to the model, while `play` notes who looked at which images."""
import gzip
import multiprocessing
import shutil
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Image, concatenate_datasets
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import harmomoe.unify
from harmomoe.baselines import compare, costs, model_soup as soups
from harmomoe.baselines.btm import btm_posterior, domain_posterior
from harmomoe.baselines.btx import linear_router, mix, random_public
from harmomoe.baselines.comigs import Participant, take_rounds
from harmomoe.baselines.compare import METHODS, Row, Source, find_method, read_rows, run_row, run_rows, write_rows
from harmomoe.baselines.intervals import half_width, percentages, with_intervals
from harmomoe.baselines.flexolmo import flexolmo, train_anchored
from harmomoe.baselines.method import PARTS, Method, bytes_sent, run_method, run_server, withhold
from harmomoe.baselines.moa import domain_loss, owned_proxies
from harmomoe.baselines.models import Ensemble, expert_tower, load, save
from harmomoe.baselines.proxies_only import proxies_only
from harmomoe.baselines.zero_shot import matching, separate_expert, zero_shot
from harmomoe.bundle import ADAPTER, Bundle, read_bundle
from harmomoe.core import MANIFEST, keep, read_manifest
from harmomoe.domains import Benchmark, Domain
from harmomoe.evaluate import accuracy
from harmomoe.experts import load_expert
from harmomoe.finetune import observe_routing, proxy_union
from harmomoe.layer import RouterSettings
from harmomoe.moe import UnifiedModel
from harmomoe.relevance import linear_probe
from harmomoe.routing import layer_means
from harmomoe.seed import Model, labelled
from harmomoe.unify import public_sample, run_client, unify

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
NAMES = [*METHODS, "expert:a"]
every_method = pytest.mark.parametrize("name", NAMES)
PERSONAL = "comigs", "matching experts"                                  # these deliver a model for each client
FLEXOLMOS = [name for name in METHODS if name.startswith("flexolmo")]
FACTORS = ["a.c_fc", "a.c_proj", "b.c_fc", "b.c_proj"]
# what training changes in the Mixture-of-Experts layers that a method delivers
MOVES = dict(btx=[*FACTORS, "router.vectors"], moa=["router.vectors"], comigs=[*FACTORS, "router.vectors"],
             **{name: ["router.vectors", "router.biases"] for name in FLEXOLMOS},
             **{name: [*FACTORS, "router.vectors", "router.blend"]
                for name in ("harmomoe", "proxies_only", "unrestricted_moe")})


def untrained(config):
    "The same settings, but nothing is trained."
    return replace(config, expert=replace(config.expert, epochs=0), finetune=replace(config.finetune, epochs=0))


def members(model):
    "The models that a method delivers, by name."
    return model if isinstance(model, dict) else {"all": model}


def towers(model):
    return [tower for own in members(model).values()
            for tower in (own.towers if isinstance(own, Ensemble) else [own.tower])]


def changed(tower, other):
    "Names of the weights that differ."
    theirs = other.state_dict()
    return {name for name, value in tower.state_dict().items() if not torch.equal(value, theirs[name])}


def forbidden(*args, **kwargs): pytest.fail("this work was done already")


def reachable(*roots):
    "All that attributes, containers, closures and defaults lead to from `roots`."
    seen, waiting = {}, [*roots]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType)): continue
        seen[id(thing)] = thing
        if isinstance(thing, Dataset): continue
        if isinstance(thing, dict): waiting += [*thing, *thing.values()]
        if isinstance(thing, (list, tuple, set, frozenset)): waiting += thing
        if isinstance(thing, partial): waiting += [thing.func, *thing.args, *thing.keywords.values()]
        if isinstance(thing, MethodType): waiting += [thing.__self__, thing.__func__]
        if isinstance(thing, FunctionType):
            waiting += [cell.cell_contents for cell in thing.__closure__ or ()] + [*(thing.__defaults__ or ())]
        waiting += getattr(thing, "__dict__", {}).values()
    return list(seen.values())


def private_parts(things, rows):
    "Domains and data sets other than the public pool's."
    return [thing for thing in things if isinstance(thing, Domain) and thing.name != "pool"
            or isinstance(thing, Dataset) and {domain for domain, *_ in rows(thing)} != {"pool"}]


@pytest.fixture(scope="module")
def rows(tiny):
    "A function (data set) -> the set of its images as (domain, split, row)."
    def encoded(dataset): return dataset.select_columns(["image"]).cast_column("image", Image(decode=False))["image"]
    known = {image["bytes"]: (domain.name, split, row) for domain in (tiny.pool, *tiny.clients)
             for split in ("train", "validation", "test") for row, image in enumerate(encoded(getattr(domain, split)))}
    assert len(known) == sum(len(getattr(domain, split)) for domain in (tiny.pool, *tiny.clients)
                             for split in ("train", "validation", "test"))
    return lambda dataset: {known[image["bytes"]] for image in encoded(dataset)}


class Watch:
    "Plays a method and notes who looked at which images, what was sent, and what the server got."

    def __init__(self, method, tiny, rows, config, work):
        self.method, self.work, self.rows = method, work, rows
        self.busy, self.turns, self.looked = [], [], defaultdict(set)
        self.got, self.written, self.exchanged = {}, {}, []
        self.before = tiny.seed.identity
        batches, own_round = tiny.seed.batches, Participant.round
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny.seed, "batches", lambda data, *args, **named: (
                self.looked[self.busy[-1]].update(rows(data)), batches(data, *args, **named))[1])
            patch.setattr(Participant, "round", lambda *args: self.round(own_round, *args))
            watched = replace(method, client=self.client, unify=self.server)
            self.model, self.report = run_method(watched, Benchmark("tiny", tiny.pool, tiny.clients), tiny.seed,
                                                 tiny.embeddings, config, work)
        self.after = tiny.seed.identity

    @contextmanager
    def turn(self, who):
        self.busy.append(who)
        self.turns.append(tuple(self.busy))
        yield
        self.busy.pop()

    def client(self, domain, *others):
        with self.turn(domain.name): made = self.method.client(domain, *others)
        self.got[domain.name] = others
        if self.method.needs == "bundles":
            self.written[made] = {file.relative_to(made).as_posix(): file.stat().st_size
                                  for file in made.rglob("*") if file.is_file()}
        return made

    def round(self, own_round, participant, mean, *others):
        mean = [part.detach().clone() for part in mean]
        with self.turn(participant.name): returned = own_round(participant, mean, *others)
        self.exchanged.append((participant.name, mean, [part.clone() for part in returned]))
        return returned

    def server(self, received, seed, pool, config, *others):
        "All of the clients' folders are out of the way while the server works."
        self.received, away = received, self.work.with_name(f"{self.work.name}-away")
        self.remained = [path for path in self.written if path.exists()]
        self.led_to = reachable(received, seed, pool, config, self.method.unify)
        self.work.rename(away)
        try:
            with self.turn("server"): return self.method.unify(received, seed, pool, config, *others)
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            away.rename(self.work)


@pytest.fixture(scope="module")
def play(tiny, rows, tmp_path_factory):
    "A function (name of a method, random seed, which time) -> a Watch; stages are shared as in a comparison."
    @lru_cache
    def folder(rng, time): return tmp_path_factory.mktemp("work")

    @lru_cache
    def run(name, rng=0, time=1):
        return Watch(find_method(name), tiny, rows, replace(tiny.settings, rng=rng), folder(rng, time))
    return lambda name, rng=0, time=1: run(name, rng, time)


@pytest.fixture(scope="module")
def batch(tiny):
    "A batch of 44 images of all domains, none of which anybody trained on."
    data = concatenate_datasets([labelled(domain.test) for domain in (tiny.pool, *tiny.clients)])
    return next(iter(tiny.seed.batches(data, batch_size=100)))


@pytest.fixture(scope="module")
def logits(tiny, batch):
    "A function (model, batch) -> scores over all class names, by name of the model."
    classes = [name for domain in (tiny.pool, *tiny.clients) for name in domain.classes]

    @torch.no_grad()
    def score(model, batch=batch): return {name: own.scorer(classes)(batch) for name, own in members(model).items()}
    return score


def alike(one, two): return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# ---- the contract: what is built

@every_method
def test_method_builds_a_model_that_scores_and_says_what_was_sent(name, play, logits):
    played = play(name)
    assert played.method.name == name and played.report["bytes"] >= 0
    assert list(members(played.model)) == (["a", "b", "c"] if name in PERSONAL else ["all"])
    for scores in logits(played.model).values(): assert scores.shape == (44, 15) and torch.isfinite(scores).all()
    losses = played.report.get("losses", [])
    assert len(losses) == (2 if name in MOVES and name != "comigs" else 0) and np.isfinite(losses).all()


@every_method
def test_no_method_changes_the_seed(name, play):
    assert play(name).before == play(name).after


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MOVES])
def test_of_a_dense_tower_only_the_weights_of_the_ffns_are_not_the_seeds(name, play, tiny):
    ffns = {f"{layer}.{linear}.weight" for layer in tiny.seed.layers for linear in tiny.seed.ffn.linears}
    for tower in towers(play(name).model):
        assert changed(tower, tiny.seed.tower) == (set() if name == "zeroshot" else ffns)


@pytest.mark.parametrize("name", MOVES)
def test_training_moves_what_it_should_and_leaves_the_rest_as_it_was(name, play, tiny):
    played, config = play(name), untrained(tiny.settings)
    received = played.received
    if name == "comigs": received = [Participant(domain, tiny.seed, tiny.pool, config) for domain in tiny.clients]
    start, _ = run_server(played.method, received, tiny.seed, tiny.pool, config)
    seed = {name.replace(".mlp.", ".mlp.ffn."): value for name, value in tiny.seed.tower.state_dict().items()}
    for who, model in members(played.model).items():
        assert changed(model.tower, members(start)[who].tower) == {
            f"{layer}.{part}" for layer in tiny.seed.layers for part in MOVES[name]}
        for part, value in seed.items(): assert torch.equal(model.tower.state_dict()[part], value), part


@pytest.mark.parametrize("name", ["moa", *FLEXOLMOS])
def test_where_only_routers_are_trained_the_experts_stay_as_they_were_sent(name, play, tiny):
    played = play(name)
    for path, layer in zip(tiny.seed.layers, played.model.layers):
        for linear in tiny.seed.ffn.linears:
            a, b = zip(*(bundle.factors[path, linear] for bundle in played.received))
            assert torch.equal(layer.a[linear], torch.cat(a)) and torch.equal(layer.b[linear], torch.cat(b, 1).T)


@every_method
def test_saved_model_comes_back_the_same_from_a_copy_of_its_folder(name, play, logits, tmp_path):
    model = play(name).model
    folder = save(model, tmp_path / "saved", dict(method=name))
    assert read_manifest(folder, "model")["inputs"] == dict(method=name)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    loaded = load(copy)
    assert type(loaded) is type(model) and alike(logits(loaded), logits(model))
    assert {who: own.parameters() for who, own in members(loaded).items()} == {
        who: own.parameters() for who, own in members(model).items()}


def test_missing_or_damaged_model_is_not_loaded(play, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"): load(tmp_path / "nothing")
    folder = save(play("btm").model, tmp_path / "saved")
    damaged = folder / "1" / "open_clip_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="was changed after it was written"): load(folder)


@every_method
def test_same_seed_gives_the_same_bytes_and_another_seed_another_model(name, play, logits, tmp_path):
    one, two = play(name).model, play(name, time=2).model
    assert alike(logits(one), logits(two))
    one, two = save(one, tmp_path / "one"), save(two, tmp_path / "two")
    files = [{path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
             for root in (one, two)]
    assert files[0] == files[1]
    other = logits(play(name, rng=1).model)
    assert all(torch.equal(scores, other[who]) == (name == "zeroshot")
               for who, scores in logits(play(name).model).items())


@every_method
def test_scores_of_a_sample_do_not_depend_on_its_batch(name, play, batch, logits):
    model = play(name).model
    parts = [logits(model, {key: value[rows] for key, value in batch.items()})
             for rows in (torch.arange(43, 6, -1), torch.tensor([3]), torch.tensor([0, 1, 2, 4, 5, 6]))]
    order = torch.tensor([*range(43, 6, -1), 3, 0, 1, 2, 4, 5, 6])
    for who, together in logits(model).items():
        assert torch.allclose(torch.cat([part[who] for part in parts]), together[order], atol=1e-4)


# ---- the contract: privacy

@every_method
def test_clients_work_one_by_one_and_only_then_the_server(name, play):
    turns = [(client,) for client in "abc"] * (play(name).method.needs in ("bundles", "rounds")) + [("server",)]
    if name == "comigs": turns += [("server", client) for client in "abc"] * 2       # the server asks for each round
    assert play(name).turns == turns


@every_method
def test_client_is_given_and_looks_at_nothing_of_another_client(name, play, rows):
    played = play(name)
    for client in set("abc") & played.looked.keys():
        splits = ("train", "validation") if name == "comigs" else ("train",)
        assert {(domain, split) for domain, split, _ in played.looked[client]} <= {
            ("pool", "train"), *((client, split) for split in splits)}
    for others in played.got.values(): assert private_parts(reachable(others), rows) == []


def test_clients_look_at_all_of_their_own_training_images(play, tiny, rows):
    "Whichever method comes first does the work of a stage that methods share."
    for client in tiny.clients:
        looked = (play(name).looked[client.name] for name, method in METHODS.items() if method.needs == "bundles")
        assert rows(client.train) <= set().union(*looked)


@every_method
def test_server_gets_what_the_method_needs_and_nothing_that_leads_to_private_data(name, play, tiny, rows):
    played = play(name)
    needs, received, sends = played.method.needs, played.received, played.method.sends
    assert (needs == "data") == (name == "unrestricted_moe") and (needs == "nothing") == (name == "zeroshot")
    if needs == "data":
        assert received == tiny.clients
        return
    if needs == "nothing": assert received == []
    if needs == "rounds":
        # Python hides nothing: a participant has its data in attributes that begin with an underscore, and a server
        # that read them would break the rules. What it offers are its other attributes and what its functions return.
        offered = [{part: value for part, value in vars(participant).items() if part[0] != "_"}
                   for participant in received]
        assert [type(participant) for participant in received] == [Participant] * 3
        assert private_parts(reachable(offered), rows) == [] and Dataset not in map(type, reachable(offered))
        return
    for bundle in received:
        assert type(bundle) is Bundle and bundle.folder is None and bundle.manifest is None
        assert (bundle.factors != {}) == ("adapter" in sends)
        assert (bundle.routing is not None) == ("routing" in sends)
        assert (bundle.proxies is not None) == ("proxies" in sends)
    assert [bundle.client for bundle in received] == (["a", "b", "c"] if needs == "bundles" else [])
    assert played.remained == [] and private_parts(played.led_to, rows) == []


def test_search_for_private_data_would_find_it(tiny, rows):
    def hidden(domain):
        def unify(bundles): return domain
        return unify
    for leak in (tiny.a, [dict(x=(tiny.a.train.select([0]),))], hidden(tiny.a), partial(hidden, tiny.a),
                 replace(tiny.bundles[0], manifest=dict(data=tiny.a.test))):
        assert private_parts(reachable(tiny.pool, leak), rows)
    assert private_parts(reachable(tiny.pool, tiny.bundles, tiny.pool.train.select([0])), rows) == []


@every_method
def test_server_looks_at_exactly_the_images_that_the_method_is_about(name, play, tiny, rows):
    played, pool = play(name), tiny.pool.train
    proxies = [bundle.proxies for bundle in played.received if name not in ("comigs", "unrestricted_moe")]
    union = rows(pool.select(proxy_union(played.received))) if proxies and proxies[0] is not None else set()
    if name == "btx": union = rows(random_public(tiny.pool, 3, tiny.settings))
    if name in ("harmomoe", "proxies_only"): union |= rows(public_sample(tiny.pool, tiny.settings))
    if name == "unrestricted_moe":
        union = rows(public_sample(tiny.pool, tiny.settings)).union(*(rows(client.train) for client in tiny.clients))
    assert played.looked["server"] == union


# ---- the contract: counts

@every_method
def test_parameters_are_counted_by_kind(name, play, tiny):
    seed, config = tiny.seed, tiny.settings
    tower = sum(value.numel() for value in seed.tower.state_dict().values())
    expert = sum(config.rank * (linear.in_features + linear.out_features) for layer in seed.layers
                 for linear in (getattr(seed.tower.get_submodule(layer), part) for part in seed.ffn.linears))
    for model in members(play(name).model).values():
        total = active = tower
        if name in MOVES:
            line = seed.width + (name in FLEXOLMOS)                                          # with its bias
            routers = len(seed.layers) * (len(model.experts) * line + 1)                     # 1 is lambda
            experts = len(set(model.experts) - {"seed"})
            total, active = tower + experts * expert + routers, tower + expert * (1 + (name == "comigs")) + routers
        elif isinstance(model, Ensemble):
            total = active = 3 * tower + (tower + 3 * (seed.embedding_size + 1)) * (name == "btm_posterior")
        assert model.parameters() == dict(total=total, active=active) and 0 < active <= total


def test_two_experts_for_a_token_are_two_experts_that_are_active(tiny, play):
    one, config = play("harmomoe").model.parameters(), untrained(tiny.settings)
    two, _ = unify(tiny.bundles, tiny.seed, tiny.pool, replace(config, router=RouterSettings(top_k=2)))
    groups = two.parameter_groups()
    assert two.parameters()["total"] == one["total"]
    assert two.parameters()["active"] - one["active"] == groups["factors"] // 3


@every_method
def test_bytes_are_those_of_the_files_that_the_method_sends(name, play, tiny):
    played = play(name)
    wanted = [file for part in played.method.sends for file in PARTS[part]]
    sizes = sum(files[file] for files in played.written.values() for file in wanted)
    if name == "comigs":
        factors = sum(part.numel() for layer in played.model["a"].layers for table in (layer.a, layer.b)
                      for part in table.values()) // 2                         # the other half is the specialist
        sizes = tiny.settings.expert.epochs * 3 * factors * 4
    assert played.report["bytes"] == sizes and (sizes > 0) == (name not in ("zeroshot", "unrestricted_moe"))


# ---- what a method is

@pytest.mark.parametrize("wrong, said", [
    (dict(needs="everything"), "needs is 'everything', but must be nothing, bundles, rounds or data"),
    (dict(sends=("adapter", "images")), "no part 'images', only adapter, routing, proxies")])
def test_method_is_checked(wrong, said):
    with pytest.raises(ValueError, match=said): Method("mine", unify, **wrong)


def test_unknown_method_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match=f"no method 'btn'; there are {', '.join(METHODS)}, and expert:CLIENT"):
        find_method("btn")
    assert find_method("expert:x").name == "expert:x" and all(find_method(name).name == name for name in METHODS)


def test_expert_of_a_client_that_there_is_not_is_an_error_that_names_it(tiny):
    with pytest.raises(ValueError, match="nobody"):
        run_server(separate_expert("nobody"), tiny.bundles, tiny.seed, tiny.pool, tiny.settings)


@pytest.mark.parametrize("sends", [(), ("adapter",), ("routing", "proxies"), tuple(PARTS)])
def test_what_is_not_sent_is_withheld(sends, tiny):
    bundle, shown = tiny.bundles[0], withhold(tiny.bundles[0], sends)
    assert (shown.client, shown.scale, shown.folder, shown.manifest) == ("a", bundle.scale, None, None)
    assert shown.factors is bundle.factors if "adapter" in sends else shown.factors == {}
    for part in ("routing", "proxies"):
        assert getattr(shown, part) is (getattr(bundle, part) if part in sends else None)
    assert bundle.folder is not None and bundle.manifest is not None
    files = [bundle.folder / file for part in sends for file in PARTS[part]]
    assert bytes_sent(replace(METHODS["harmomoe"], sends=sends), [bundle]) == sum(f.stat().st_size for f in files)


def test_harmomoe_among_the_methods_is_harmomoe(play, tiny, logits):
    model, report = unify(tiny.bundles, tiny.seed, tiny.pool, tiny.settings)
    assert alike(logits(model), logits(play("harmomoe").model))
    assert play("harmomoe").report["losses"] == report["losses"]


# ---- ensembles and averages

def test_expert_as_a_tower_is_the_expert_that_was_sent(tiny, logits):
    for bundle in tiny.bundles:
        merged = load_expert(tiny.seed, bundle.folder / ADAPTER)
        found, wanted = (logits(Model(tiny.seed, tower))["all"] for tower in (expert_tower(tiny.seed, bundle), merged))
        assert torch.allclose(found, wanted, atol=1e-4)


def test_matching_experts_are_harmomoes_own_each_for_the_client_that_sent_it(play, tiny, logits):
    "They are trained on proxies too, unlike a separate expert."
    models = play("matching experts").model
    assert list(models) == [bundle.client for bundle in tiny.bundles] and len(set(map(id, models.values()))) == 3
    for bundle in tiny.bundles:
        wanted = Model(tiny.seed, load_expert(tiny.seed, bundle.folder / ADAPTER))
        assert type(models[bundle.client]) is Model
        assert torch.allclose(logits(models[bundle.client])["all"], logits(wanted)["all"], atol=1e-4)
    assert not torch.allclose(logits(models["a"])["all"], logits(play("expert:a").model)["all"], atol=1e-2)
    model, report = run_server(matching, tiny.bundles[1:2], tiny.seed, tiny.pool, tiny.settings)
    assert list(model) == ["b"] and report == {}


def member_probabilities(tiny, batch):
    score = tiny.seed.scorer(tiny.pool.classes)
    with torch.no_grad():
        return torch.stack([score(expert_tower(tiny.seed, bundle), batch).double().softmax(-1)
                            for bundle in tiny.bundles], 1)


def test_ensemble_is_the_mean_of_its_members_probabilities(tiny, batch):
    ensemble = Ensemble(tiny.seed, [expert_tower(tiny.seed, bundle) for bundle in tiny.bundles])
    found = ensemble.scorer(tiny.pool.classes)(batch).double().exp()
    assert torch.allclose(found, member_probabilities(tiny, batch).mean(1), atol=1e-6)


def test_ensemble_with_a_posterior_weighs_its_members_by_it(tiny, batch):
    ensemble, _ = btm_posterior.unify(tiny.bundles, tiny.seed, tiny.pool, tiny.settings)
    z = tiny.seed.hidden(tiny.seed.tower, batch).double()
    weights = (z @ ensemble.vectors.double().T + ensemble.biases.double()).softmax(-1)
    assert weights.shape == (44, 3) and weights.std(0).min() > .01
    wanted = (weights[..., None] * member_probabilities(tiny, batch)).sum(1)
    assert torch.allclose(ensemble.scorer(tiny.pool.classes)(batch).double().exp(), wanted, atol=1e-5)


@pytest.mark.parametrize("sizes", [(20, 20), (30, 10), (12, 12, 12), (10, 20, 30)], ids=str)
def test_domain_posterior_is_the_classifiers(sizes, tiny):
    "Standardisation is folded into the vectors, and two domains have two lines as three have three."
    rng = np.random.default_rng(0)
    parts = [rng.normal(k / 2, 1 + k, (size, 5)).astype(np.float32) for k, size in enumerate(sizes)]
    x, y = np.concatenate(parts).astype(np.float64), np.repeat(range(len(sizes)), sizes)
    scaled = StandardScaler().fit_transform(x)
    classifier = LogisticRegression(class_weight="balanced", max_iter=1000)
    search = GridSearchCV(classifier, dict(C=[1e-5, 1e-4, 1e-3, .01, .1, 1.]), scoring="neg_log_loss",
                          cv=StratifiedKFold(5, shuffle=True, random_state=3)).fit(scaled, y)
    wanted = make_pipeline(StandardScaler(), search.best_estimator_).fit(x, y).predict_proba(x)
    vectors, biases = domain_posterior(parts, 3)
    assert vectors.shape == (len(sizes), 5) and biases.shape == (len(sizes),)
    found = (torch.tensor(x).float() @ vectors.T + biases).softmax(-1)
    assert np.allclose(found.numpy(), wanted, atol=1e-5)


def test_posterior_of_a_single_client_is_one(tiny, batch):
    ensemble, _ = btm_posterior.unify(tiny.bundles[:1], tiny.seed, tiny.pool, tiny.settings)
    alone = Model(tiny.seed, expert_tower(tiny.seed, tiny.bundles[0])).scorer(tiny.pool.classes)(batch)
    assert torch.allclose(ensemble.scorer(tiny.pool.classes)(batch), alone.log_softmax(-1), atol=1e-5)


def test_average_of_towers_is_the_mean_of_every_parameter(tiny):
    generator, parts = torch.Generator().manual_seed(0), [tiny.seed.new_tower() for _ in range(3)]
    with torch.no_grad():
        for tower in parts:
            for parameter in tower.parameters(): parameter += torch.randn(parameter.shape, generator=generator)
    mean, tables = soups.average(tiny.seed, parts), [dict(tower.named_parameters()) for tower in parts]
    count = 0
    for name, parameter in mean.named_parameters():
        wanted = torch.stack([table[name].double() for table in tables]).mean(0)
        assert torch.allclose(parameter.double(), wanted, atol=1e-6, rtol=1e-6), name
        count += 1
    assert count == len(list(tiny.seed.tower.parameters())) == len(tables[0])
    assert changed(mean, tiny.seed.tower) == set(tiny.seed.tower.state_dict())           # there are no buffers


@pytest.mark.parametrize("alone, together, kept", [
    ((5, 9, 7), (9, 9, 8), "bc"),               # not worse: kept; worse: left out
    ((5, 9, 7), (9, 8, 10), "ba"),              # the third is tried without the second
    ((5, 9, 7), (9, 8, 8), "b"), ((4, 4, 4), (4, 4, 4), "abc"), ((0, 0, 0), (0, 1, 2), "abc")])
def test_greedy_soup_keeps_the_best_and_adds_what_does_no_harm(alone, together, kept, tiny, rows, monkeypatch):
    answers, union = iter([*alone, *together]), rows(tiny.pool.train.select(proxy_union(tiny.bundles)))

    def judge(model, data, classes, **named):
        assert rows(data) == union and classes == tiny.pool.classes
        return SimpleNamespace(correct=next(answers))
    monkeypatch.setattr(soups, "accuracy", judge)
    model, report = soups.greedy_soup(tiny.bundles, tiny.seed, tiny.pool, tiny.settings)
    assert report["kept"] == [*kept] and next(answers, None) is None
    wanted = soups.average(tiny.seed, [expert_tower(tiny.seed, b) for b in tiny.bundles if b.client in kept])
    for name, value in wanted.state_dict().items(): assert torch.allclose(model.tower.state_dict()[name], value)


# ---- Mixtures of Experts with other routers

def test_btx_sees_as_many_random_public_samples_as_there_would_be_proxies(tiny, rows):
    config, pool = tiny.settings, tiny.pool
    chosen = rows(random_public(pool, 3, config))
    assert len(chosen) == 3 * config.proxies and {(domain, split) for domain, split, _ in chosen} == {("pool", "train")}
    assert chosen == rows(random_public(pool, 3, config)) != rows(random_public(pool, 3, replace(config, rng=1)))
    assert chosen != rows(pool.train.select(proxy_union(tiny.bundles)))
    assert len(random_public(pool, 50, config)) == len(pool.train)


@pytest.mark.parametrize("top_k, sums_to_one", [(1, False), (2, True), (3, True)])
def test_btx_divides_by_the_sum_of_the_weights_only_where_there_are_several(top_k, sums_to_one, tiny):
    assert linear_router(top_k).renormalise == sums_to_one
    config = replace(untrained(tiny.settings), router=RouterSettings(top_k=top_k))
    model, _ = mix(tiny.bundles, tiny.seed, tiny.pool, config)
    assert model.experts == ["a", "b", "c"]
    assert np.allclose(observe_routing(model, tiny.pool.test).weight, 1) == sums_to_one


def test_moa_labels_each_clients_proxies_with_its_name_and_shared_ones_with_both(tiny, rows):
    same = [replace(bundle, proxies=tiny.bundles[0].proxies) for bundle in tiny.bundles[:2]]
    for bundles in (tiny.bundles, same):
        data = owned_proxies(bundles, tiny.pool)
        assert data["class_name"] == [bundle.client for bundle in bundles for _ in range(12)]
        for index, bundle in enumerate(bundles):
            for place, row in enumerate(bundle.proxies.ids.tolist()):
                assert rows(data.select([12 * index + place])) == {("pool", "train", row)}


def test_moa_minimises_minus_log_pi_of_the_owner_in_every_layer(play, tiny):
    model = play("moa").model
    data, targets = tiny.pool.test, torch.arange(12) % 3
    [batch] = tiny.seed.batches(data)
    found = domain_loss(model)(model.tower, dict(batch, targets=targets))
    logits = torch.stack([means @ layer.router.vectors.T
                          for means, layer in zip(layer_means(tiny.seed, model.tower, data, 12), model.layers)])
    assert model.experts == ["a", "b", "c"]
    wanted = -logits.double().log_softmax(-1)[:, range(12), targets].mean()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-5)


def test_flexolmo_trains_one_line_beside_the_public_one_and_sends_the_pair(tiny, logits, tmp_path, monkeypatch):
    pairs, save_own_expert = [], harmomoe.baselines.flexolmo.save_own_expert
    monkeypatch.setattr(harmomoe.baselines.flexolmo, "save_own_expert",
                        lambda folder, model, config: (pairs.append(model), save_own_expert(folder, model, config)))
    config = replace(tiny.settings, expert=replace(tiny.settings.expert, weight_decay=.1))
    folder = train_anchored(tiny.a, tiny.seed, tiny.pool, tiny.embeddings, flexolmo.adjust(config), tmp_path)
    [pair], bundle = pairs, read_bundle(folder, tiny.seed)
    for index, (path, layer) in enumerate(zip(tiny.seed.layers, pair.layers)):
        router = layer.router
        assert not router.vectors[0].any() and router.biases[0] == 0 and router.biases[1] != 0 and router.blend == 0
        assert torch.equal(bundle.routing.vectors[index], router.vectors[1])
        assert torch.equal(bundle.routing.biases[index], router.biases[1])
        for linear in tiny.seed.ffn.linears:
            a, b = bundle.factors[path, linear]
            assert torch.equal(a, layer.a[linear]) and torch.equal(b, layer.b[linear].T) and b.any()
    both = replace(untrained(config), router=RouterSettings(top_k=2))
    united, _ = run_server(flexolmo, [bundle], tiny.seed, tiny.pool, both)
    assert torch.allclose(logits(united)["all"], logits(pair)["all"], atol=1e-5)


def test_weights_of_flexolmos_experts_sum_to_one_as_those_of_a_pair(tiny, tmp_path):
    config = untrained(flexolmo.adjust(tiny.settings))
    bundles = [read_bundle(train_anchored(client, tiny.seed, tiny.pool, tiny.embeddings, config, tmp_path / client.name),
                           tiny.seed) for client in tiny.clients]
    united, _ = run_server(flexolmo, bundles, tiny.seed, tiny.pool, replace(config, router=RouterSettings(top_k=2)))
    for layer in united.layers:
        weights, _ = layer.router(torch.randn(1, 5, tiny.seed.width))
        assert len(layer.router.vectors) > 2 == weights.shape[-1] and torch.allclose(weights.sum(-1), torch.ones(1, 5))


@pytest.mark.parametrize("name", FLEXOLMOS[1:])
def test_flexolmos_forms_differ_in_the_proxies_alone(name, play):
    for one, two in zip(play(FLEXOLMOS[0]).received, play(name).received):
        assert one.proxies.method != two.proxies.method and one.proxies.ids.tolist() != two.proxies.ids.tolist()
        for key, pair in one.factors.items(): assert equal(pair, two.factors[key])
        assert torch.equal(one.routing.vectors, two.routing.vectors)


def test_proxies_only_experts_never_see_a_private_image(tiny, rows, tmp_path, monkeypatch):
    seen, train_expert = [], harmomoe.unify.train_expert

    def spy(seed, private, proxies, *others):
        seen.append((rows(private), proxies))
        return train_expert(seed, private, proxies, *others)
    monkeypatch.setattr(harmomoe.unify, "train_expert", spy)
    config = proxies_only.adjust(tiny.settings)
    bundle = read_bundle(run_client(tiny.a, tiny.seed, tiny.pool, tiny.embeddings, config, tmp_path), tiny.seed)
    assert seen == [({("pool", "train", row) for row in bundle.proxies.ids.tolist()}, None)]


# ---- CoMiGS

def halves(model, rank):
    "The factors of a client's generalist, and of its specialist."
    tables = [part for layer in model.layers for table in (layer.a, layer.b) for part in table.values()]
    return [part[:rank] for part in tables], [part[rank:] for part in tables]


def equal(one, two): return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_comigs_ends_with_one_generalist_the_mean_and_a_specialist_for_each(play, tiny):
    played, rank = play("comigs"), tiny.settings.rank
    assert len(played.exchanged) == 3 * tiny.settings.expert.epochs
    last = [returned for _, _, returned in played.exchanged[-3:]]
    assert not equal(last[0], last[1])
    mean = [torch.stack(parts).double().mean(0) for parts in zip(*last)]
    for model in played.model.values():
        generalist, specialist = halves(model, rank)
        assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(generalist, mean))
        assert equal(generalist, halves(played.model["a"], rank)[0])
        assert equal(specialist, halves(played.model["a"], rank)[1]) == (model is played.model["a"])
    assert [experts for model in played.model.values() for experts in model.experts] == ["generalist", "specialist"] * 3


def test_comigs_exchanges_factors_of_the_generalist_and_nothing_else(play, tiny):
    rank = tiny.settings.rank
    shapes = [(rank, size) for _ in tiny.seed.layers for size in (64, 256, 256, 64)]
    for _, mean, returned in play("comigs").exchanged:
        for parts in (mean, returned):
            assert all(type(part) is torch.Tensor and not part.requires_grad for part in parts)
            assert [tuple(part.shape) for part in parts] == shapes
    for participant in play("comigs").received:
        shown = participant.generalist()
        assert isinstance(shown, list) and [tuple(part.shape) for part in shown] == shapes


def test_comigs_gives_everybody_the_same_mean_in_every_round(play):
    rounds = play("comigs").exchanged
    for first in range(0, len(rounds), 3):
        for _, mean, _ in rounds[first:first + 3]: assert equal(mean, rounds[first][1])
        if first:
            last = [returned for _, _, returned in rounds[first - 3:first]]
            assert equal(rounds[first][1], [torch.stack(parts).mean(0) for parts in zip(*last)])


def test_comigs_does_not_depend_on_the_order_of_the_clients(play, tiny, logits):
    backwards = [Participant(domain, tiny.seed, tiny.pool, tiny.settings) for domain in tiny.clients[::-1]]
    found = logits(take_rounds(backwards, tiny.seed, tiny.pool, tiny.settings)[0])
    for name, scores in logits(play("comigs").model).items(): assert torch.allclose(found[name], scores, atol=1e-3)


def test_comigs_trains_experts_on_train_and_routers_on_validation(tiny, rows, monkeypatch):
    calls, train = [], harmomoe.baselines.comigs.train

    def spy(seed, tower, data, *others):
        parts = {name.split(".mlp.")[1] for name, p in tower.named_parameters() if p.requires_grad}
        calls.append((parts, rows(data)))
        return train(seed, tower, data, *others)
    monkeypatch.setattr(harmomoe.baselines.comigs, "train", spy)
    config = replace(tiny.settings, expert=replace(tiny.settings.expert, epochs=3))
    participants = [Participant(domain, tiny.seed, tiny.pool, config) for domain in tiny.clients[:2]]
    take_rounds(participants, tiny.seed, tiny.pool, config)
    wanted = [pair for domain in tiny.clients[:2]
              for pair in ((set(FACTORS), rows(domain.train)), ({"router.vectors"}, rows(domain.validation)))]
    assert calls == 3 * wanted                                           # as many rounds as epochs


# ---- comparisons

@pytest.fixture(scope="module")
def source(tiny_seed_folder, tiny_folder):
    return Source(backbone=str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool")


@pytest.fixture(scope="module")
def lines(tiny):
    return [Row(name, tiny.settings) for name in ("zeroshot", "expert:a", "comigs", "harmomoe", "matching experts")]


@pytest.fixture(scope="module")
def compared(lines, source, tmp_path_factory):
    "Folder and results of a comparison; tests work on copies of the folder."
    folder = tmp_path_factory.mktemp("compared")
    return folder, run_rows(lines, source, folder)


@pytest.fixture
def again(compared, tmp_path): return shutil.copytree(compared[0], tmp_path / "compared")


def kept(folder): return sorted(path.name for path in (folder / "rows").iterdir())


def test_rows_hold_what_the_methods_give(compared, lines, play, tiny):
    for row, result in zip(lines, compared[1], strict=True):
        played = play(row.method)
        assert result["bytes"] == played.report["bytes"]
        for client in tiny.clients:
            model = played.model[client.name] if row.method in PERSONAL else played.model
            assert result["accuracy"][client.name] == asdict(accuracy(model, client.test, client.classes))
            assert result["parameters"] == model.parameters()
            assert (client.name in result["routing"]) == isinstance(model, UnifiedModel)
            if isinstance(model, UnifiedModel):
                seen = observe_routing(model, client.test)
                shown = result["routing"][client.name]
                assert shown["experts"] == model.experts and np.allclose(shown["load"], seen.load, atol=1e-4)


def test_second_run_does_nothing_heavy_and_gives_the_same(compared, again, lines, source, monkeypatch):
    for name in ("train_expert", "select_proxies", "linear_probe", "client_routing"):
        monkeypatch.setattr(harmomoe.unify, name, forbidden)
    for name in ("run_method", "accuracy"): monkeypatch.setattr(compare, name, forbidden)
    monkeypatch.setattr(source.seed(), "embed", forbidden)
    assert run_rows(lines, source, again) == compared[1]


def test_damaged_row_is_made_again_and_only_that_one(compared, again, lines, source, monkeypatch):
    calls = []
    monkeypatch.setattr(compare, "run_method", lambda method, *others: (
        calls.append(method.name), run_method(method, *others))[1])
    damaged = next((again / "rows").glob("expert-a-*")) / MANIFEST
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert run_rows(lines, source, again) == compared[1] and calls == ["expert:a"]


def test_published_rows_need_no_work_where_they_are_unpacked(compared, lines, source, tmp_path, monkeypatch):
    file, folder = tmp_path / "rows.json.gz", tmp_path / "elsewhere"
    write_rows(lines, source, compared[0], file)
    first = file.read_bytes()
    write_rows(lines, source, compared[0], file)
    assert file.read_bytes() == first
    assert read_rows(file, folder) == len(lines) and read_rows(file, folder) == 0
    for name in ("run_clients", "run_method", "accuracy"): monkeypatch.setattr(compare, name, forbidden)
    assert run_rows(lines, source, folder) == compared[1] and not (folder / "clients").exists()


def test_only_finished_rows_are_published_and_only_rows_are_read(compared, lines, source, tiny, tmp_path):
    with pytest.raises(ValueError, match="btm is not finished in"):
        write_rows([*lines, Row("btm", tiny.settings)], source, compared[0], tmp_path / "rows.json.gz")
    assert not list(tmp_path.iterdir())
    for content in (b"no gzip", gzip.compress(b"no json"), gzip.compress(b'{"../up": {}}')):
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(ValueError, match="holds no rows"): read_rows(tmp_path / "odd", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_settings_split_or_seed_make_another_row_beside_it(again, source, tiny):
    before, row = kept(again), Row("zeroshot", tiny.settings)
    assert [result["n"] for result in run_row(row, source, again, "validation")["accuracy"].values()] == [6, 4, 8]
    for change in (dict(rank=2), dict(rng=1)): run_row(Row("zeroshot", replace(tiny.settings, **change)), source, again)
    assert len(kept(again)) == len(before) + 3 and set(before) < set(kept(again))
    run_row(row, source, again)
    mine = run_row(Row("mine", tiny.settings), source, again, method=replace(zero_shot, name="mine"))
    assert mine == run_row(row, source, again) and len(kept(again)) == len(before) + 4


def test_row_is_made_again_when_data_change_that_the_method_uses(tiny, tmp_path):
    "The routers of CoMiGS are trained on validation splits."
    config = replace(tiny.settings, expert=replace(tiny.settings.expert, epochs=1))
    for clients in (tiny.clients, [replace(c, validation=c.validation.select([0, 1])) for c in tiny.clients]):
        benchmark = Benchmark("tiny", tiny.pool, clients)
        opened = SimpleNamespace(seed=lambda: tiny.seed, benchmark=lambda rng: benchmark, workers=0)
        run_row(Row("comigs", config), opened, tmp_path)
    assert len(kept(tmp_path)) == 2


def diverging(config):
    "The same settings, but the server's training fails, after the clients have done their work."
    return replace(config, finetune=replace(config.finetune, learning_rate=1e38, optimizer="sgd"))


def test_error_of_a_row_surfaces_and_finished_rows_stay(source, tiny, tmp_path):
    rows = [Row("zeroshot", tiny.settings), Row("expert:a", tiny.settings), Row("btx", diverging(tiny.settings))]
    with pytest.raises(FloatingPointError, match="ower the learning rate"): run_rows(rows, source, tmp_path)
    assert [name.rpartition("-")[0] for name in kept(tmp_path)] == ["expert-a", "zeroshot"]


@pytest.mark.parametrize("method, changes, processes, said", [
    ("nonsense", {}, 1, "no method 'nonsense'"), ("zeroshot", {}, 0, "processes is 0"),
    ("expert:d", {}, 1, "no client 'd'; there are a, b, c"),
    ("btx", dict(router=RouterSettings(top_k=9)), 2, "top_k is 9"),
    ("harmomoe", dict(candidates=91), 1, "candidates is 91, but the pool has 90 samples")], ids=str)
def test_wrong_rows_are_refused_before_any_work(method, changes, processes, said, source, tiny, tmp_path):
    rows = [Row("zeroshot", tiny.settings), Row(method, replace(tiny.settings, **changes))]
    with pytest.raises(ValueError, match=said): run_rows(rows, source, tmp_path, processes)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_give_the_same_and_an_error_of_one_surfaces(compared, lines, source, tiny, tmp_path,
                                                                      monkeypatch):
    good, wrong = [0, 1, 3, 4], Row("btx", diverging(tiny.settings))
    with pytest.raises(FloatingPointError, match="ower the learning rate"):
        run_rows([*(lines[i] for i in good), wrong], source, tmp_path, processes=2)
    monkeypatch.setattr(compare, "run_method", forbidden)                                # all others were finished
    assert run_rows([lines[i] for i in good], source, tmp_path) == [compared[1][i] for i in good]


def test_a_limit_leaves_so_many_images_of_each_split(source):
    few = replace(source, limit=5).benchmark(0)
    assert all(len(getattr(domain, split)) <= 5 for domain in (few.pool, *few.clients)
               for split in ("train", "validation", "test"))
    assert source.benchmark(0) is source.benchmark(0) and source.seed() is source.seed()


# ---- tables

def result(*correct): return dict(accuracy={name: dict(correct=c, n=20) for name, c in zip("xy", correct)}, bytes=0)


RESULTS = dict(second=[result(10, 20), result(12, 16), result(11, 18)], first=[result(8, 8)] * 3)


@pytest.mark.parametrize("values", [[1., 2.], [50., 50., 50.], [61.2, 64.9, 60.1, 63.]])
def test_half_width_is_students(values):
    low, high = stats.t.interval(.95, len(values) - 1, np.mean(values), stats.sem(values)) if np.ptp(values) else (0, 0)
    assert half_width(np.array(values)) == pytest.approx((high - low) / 2)


def test_a_single_value_has_no_half_width(): assert np.isnan(half_width([3.]))


def test_percentages_have_a_line_for_each_method_and_seed():
    table = percentages(RESULTS)
    assert table.index.tolist() == [(label, seed) for label in ("second", "first") for seed in range(3)]
    assert table.index.names == ["method", "seed"] and table.columns.tolist() == ["x", "y", "average"]
    assert table.loc[("second", 1)].tolist() == [60, 80, 70] and (table.loc["first"] == 40).all(axis=None)


@pytest.mark.filterwarnings("error")
def test_intervals_are_means_and_half_widths_and_differences_are_taken_seed_by_seed():
    shown = with_intervals(percentages(RESULTS), "first", 2)
    assert shown.index.tolist() == ["second", "first"]
    assert shown.columns.tolist() == ["x", "y", "average", "against first"]
    t = 4.302653                                                   # Student's t, two degrees of freedom, 97.5 %
    assert shown.loc["second", "x"] == f"55.00 ± {t * 5 / 3 ** .5:.2f}" and shown.loc["first", "y"] == "40.00 ± 0.00"
    averages = np.array([75, 70, 72.5])
    half = t * averages.std(ddof=1) / 3 ** .5
    assert shown.loc["second"].tolist()[2:] == [f"{averages.mean():.2f} ± {half:.2f}", f"+32.50 ± {half:.2f}"]
    assert shown.loc["first", "against first"] == ""
    single = with_intervals(percentages({"one": [result(1, 2)]}))
    assert single.loc["one"].tolist() == ["5.0", "10.0", "7.5"] and isinstance(single, pd.DataFrame)


# ---- costs

def test_selection_is_timed_in_rounds_of_which_the_first_does_not_count(tiny, monkeypatch):
    relevance, calls, clock = linear_probe(tiny.embeddings[:20], tiny.embeddings), [], [0.]
    takes = dict(random=[50, 3, 1, 2], similarity=[60, 7, 8, 5], dpp=[70, 20, 40, 30])

    def select(embeddings, scores, m, n, method, rng):
        assert embeddings is tiny.embeddings and scores is relevance.scores
        assert (m, n, rng) == (tiny.settings.proxies, tiny.settings.candidates, tiny.settings.rng)
        clock[0] += takes[method][calls.count(method)]
        calls.append(method)
    monkeypatch.setattr(costs, "select_proxies", select)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    table = costs.selection_seconds(tiny.embeddings, relevance, tiny.settings, rounds=3)
    assert calls == ["random", "similarity", "dpp"] * 4 and table.index.name == "selection"
    assert table.T.to_dict() == dict(random=dict(seconds=2, lowest=1, highest=3),
                                     similarity=dict(seconds=7, lowest=5, highest=8),
                                     dpp=dict(seconds=30, lowest=20, highest=40))


def test_selection_takes_time(tiny):
    relevance = linear_probe(tiny.embeddings[:20], tiny.embeddings)
    table = costs.selection_seconds(tiny.embeddings, relevance, tiny.settings, rounds=2)
    assert table.columns.tolist() == ["seconds", "lowest", "highest"] and (table > 0).all(axis=None)
    assert (table.lowest <= table.seconds).all() and (table.seconds <= table.highest).all()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured on Linux only")
def test_peak_memory_is_that_of_the_process_alone_and_grows_by_what_is_touched():
    "A fresh process starts from its own mark, not from that of the process that started it."
    held = np.ones(50 * 2 ** 20)                                                            # 400 MB
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before = pool.submit(costs._peak, "cpu").result()
        pool.submit(exec, "import numpy; numpy.ones(25 * 2 ** 20)").result()                # 200 MB, given back
        after = pool.submit(costs._peak, "cpu").result()
    assert 50 < before < costs._peak("cpu") - held.nbytes / 2 ** 20 / 2
    assert after - before == pytest.approx(200, abs=60)


def test_peak_memory_is_not_a_number_where_it_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(costs, "Path", lambda name: Path("/nowhere") / name.lstrip("/"))
    assert np.isnan(costs._peak("cpu"))


def test_method_without_a_servers_part_of_its_own_has_no_server_costs(source, tiny, tmp_path):
    with pytest.raises(ValueError, match="comigs has no server's part of its own; choose a method that needs bundles"):
        costs.server_costs(Row("comigs", tiny.settings), source, tmp_path / "work", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# ---- versions of an artefact

def test_kept_versions_stay_side_by_side_and_changing_back_costs_nothing(tmp_path):
    built = []

    def make(value):
        def build(folder):
            built.append(value)
            (folder / "value").write_text(str(value))
            return dict(value=value)
        return keep(tmp_path, "thing", dict(value=value, pair=(1, 2)), build)
    one, two = make(1), make(2)
    assert make(1) == one != two and built == [1, 2]
    assert [read_manifest(path, "thing")["facts"]["value"] for path in (one, two)] == [1, 2]
    assert sorted(tmp_path.iterdir()) == sorted([one, two]) and all(p.name.startswith("thing-") for p in (one, two))
    (one / "value").write_text("damaged")
    assert make(1) == one and built == [1, 2, 1] and (two / "value").read_text() == "2"
