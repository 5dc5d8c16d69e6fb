"""Every method that is compared keeps one contract: what it builds, who sees what, what is
counted."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from networks import moved, weights
from watching import (
    PERSONAL,
    Watch,
    alike,
    backbones,
    members,
    private_parts,
    reachable,
    untrained,
)

from harmomoe.base.artefacts import digest_weights, read_manifest
from harmomoe.baselines.btx import random_public
from harmomoe.baselines.comigs import Participant
from harmomoe.baselines.method import PARTS, AllData, OneShot, Rounds
from harmomoe.baselines.methods import (
    METHODS,
    ROUTER_TITLES,
    TITLES,
    TOLD,
    find_method,
    method_title,
)
from harmomoe.bundle.files import Bundle, read_bundle
from harmomoe.config.settings import changed
from harmomoe.models.ensemble import Ensemble
from harmomoe.models.model import load_model
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed
from harmomoe.server.finetune import proxy_union
from harmomoe.server.merge import ROUTERS
from harmomoe.server.server import unify

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
every_method = pytest.mark.parametrize("name", METHODS)
FLEXOLMOS = [name for name in METHODS if name.startswith("flexolmo")]
FACTORS = ["a.c_fc", "a.c_proj", "b.c_fc", "b.c_proj"]
# what training changes in the Mixture-of-Experts layers that a method delivers
MOVES = dict(
    **{name: [*FACTORS, "router.vectors"] for name in ("btx", "btx_ties", "btx_dare")},
    moa=["router.vectors"],
    comigs=[*FACTORS, "router.vectors"],
    **{name: ["router.vectors", "router.biases"] for name in FLEXOLMOS},
    **{
        name: [*FACTORS, "router.vectors", "router.lam"]
        for name in ("harmomoe", "proxies_only", "unrestricted_moe", "unrestricted_proxies")
    },
)
ROUTED = "arrow", "perplexity", "task_vector"  # other kinds of mixtures, which nobody trains
ALL_DATA = "unrestricted_moe", "unrestricted_proxies", "expert_all_data"
TRAINED = {*MOVES, "expert_all_data"} - {"comigs"}  # by one training at the server


def test_a_method_is_found_by_its_name_and_an_unknown_name_says_which_there_are():
    assert all(find_method(name).name == name for name in METHODS)
    with pytest.raises(ValueError, match=f"no method 'btn'; there are {', '.join(METHODS)}"):
        find_method("btn")


def test_every_method_has_a_title_of_its_own_and_ours_is_marked():
    assert TITLES.keys() == METHODS.keys() and set(TOLD) <= METHODS.keys()
    assert len(set(TITLES.values())) == len(TITLES)
    assert [method_title(name) for name in TITLES] == list(TITLES.values())
    assert [title for title in TITLES.values() if "(ours)" in title] == [method_title("harmomoe")]
    assert method_title("expert:flags") == "Expert for flags"
    assert method_title("harmomoe, paper's router") == "HarmoMoE, paper's router"
    assert method_title("harmomoe:paper") == "HarmoMoE, paper's router"
    assert {f"harmomoe:{name}" for name in ROUTERS} == ROUTER_TITLES.keys()
    assert method_title("dispatch") == "dispatch"


# ---- what is built


@every_method
def test_method_builds_a_model_that_scores_and_says_what_was_sent(name, play, logits):
    played = play(name)
    assert played.method.name == name and played.bytes >= 0
    assert list(members(played.model)) == (["a", "b", "c"] if name in PERSONAL else ["all"])
    for scores in logits(played.model).values():
        assert scores.shape == (44, 15) and torch.isfinite(scores).all()
    losses = played.model.losses
    assert len(losses) == (2 if name in TRAINED else 0)
    assert np.isfinite(losses).all()


@every_method
def test_no_method_changes_the_seed(name, play, tiny_seed_folder):
    assert play(name).seed == digest_weights(open_seed(str(tiny_seed_folder)).whole)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*MOVES, *ROUTED)])
def test_of_a_dense_backbone_only_the_weights_of_the_ffns_are_not_the_seeds(name, play, tiny):
    linears = tiny.seed.ffn.linears
    ffns = {f"{layer}.{linear}.weight" for layer in tiny.seed.layers for linear in linears}
    before = weights(tiny.seed.backbone)
    for backbone in backbones(play(name).model):
        assert moved(backbone, before) == (set() if name == "zeroshot" else ffns)


@pytest.mark.parametrize("name", MOVES)
def test_training_moves_what_it_should_and_leaves_the_rest_as_it_was(name, play, tiny):
    played = play(name)
    public, received = played.public.with_config(untrained(played.public.config)), played.received
    if name == "comigs":
        received = [Participant(public, domain) for domain in tiny.clients]
    start = members(played.method.serve(received, public))
    wanted = {f"{layer}.{part}" for layer in tiny.seed.layers for part in MOVES[name]}
    seed = weights(tiny.seed.backbone)
    for who, model in members(played.model).items():
        assert moved(model.backbone, weights(start[who].backbone)) == wanted
        now = model.backbone.state_dict()
        for part, value in seed.items():
            assert torch.equal(now[part.replace(".mlp.", ".mlp.ffn.")], value), part


@pytest.mark.parametrize("name", ["moa", *FLEXOLMOS])
def test_where_only_routers_are_trained_the_experts_stay_as_they_were_sent(name, play, tiny):
    played = play(name)
    for path, layer in zip(tiny.seed.layers, played.model.layers):
        for linear in tiny.seed.ffn.linears:
            a, b = zip(*(bundle.factors[path, linear] for bundle in played.received))
            assert torch.equal(layer.a[linear], torch.cat(a))
            assert torch.equal(layer.b[linear], torch.cat(b, 1).T)


@every_method
def test_saved_model_comes_back_the_same_from_a_copy_of_its_folder(name, play, logits, tmp_path):
    model = play(name).model
    folder = model.save(tmp_path / "saved", dict(method=name))
    assert read_manifest(folder, "model")["inputs"] == dict(method=name)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    loaded = load_model(copy)
    assert type(loaded) is type(model) and alike(logits(loaded), logits(model))
    counts = [{w: m.count_parameters() for w, m in members(x).items()} for x in (loaded, model)]
    assert counts[0] == counts[1]


@every_method
def test_from_the_same_the_server_makes_the_same_bytes(name, play, tiny, tmp_path):
    played, files = play(name), []
    for time, model in enumerate((played.model, played.again(tiny.clients))):
        assert model.losses == played.model.losses
        root = model.save(tmp_path / str(time))
        paths = [path for path in root.rglob("*") if path.is_file()]
        files.append({path.relative_to(root): path.read_bytes() for path in paths})
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["harmomoe", "expert", "flexolmo", "proxies_only"])
def test_from_the_same_data_clients_make_the_same_bundles(name, play, tiny, tmp_path):
    "In a folder of their own, where nothing has been computed."
    played = play(name)
    public = replace(played.public, folder=tmp_path / "public")
    [found] = played.method.receive(public, tiny.clients[1:2], tmp_path / "work")
    client = played.method.client(public, tiny.b, played.work / "b")
    wanted = read_bundle(client.bundle(tmp_path / "bundle"), public)
    assert found.manifest == wanted.manifest  # which has the digests of all files


@every_method
def test_another_random_state_gives_another_model(name, play, logits):
    others = logits(play(name, random_state=1).model)
    for who, scores in logits(play(name).model).items():
        assert torch.equal(scores, others[who]) == (name == "zeroshot")


@every_method
def test_scores_of_a_sample_do_not_depend_on_its_batch(name, play, batch, logits):
    model, chosen = play(name).model, ([*range(43, 6, -1)], [3], [0, 1, 2, 4, 5, 6])
    parts = [logits(model, {key: value[rows] for key, value in batch.items()}) for rows in chosen]
    for who, together in logits(model).items():
        apart = torch.cat([part[who] for part in parts])
        assert torch.allclose(apart, together[sum(chosen, [])], atol=1e-4)


# ---- privacy


@every_method
def test_clients_work_one_by_one_and_only_then_the_server(name, play):
    asked = isinstance(play(name).method, (OneShot, Rounds))
    turns = [(client,) for client in "abc"] * asked + [("server",)]
    if name == "comigs":
        turns += [("server", client) for client in "abc"] * 2  # the server asks for each round
    assert play(name).turns == turns


@every_method
def test_client_is_given_and_looks_at_nothing_of_another_client(name, play, rows):
    played, splits = play(name), ("train", "validation") if name == "comigs" else ("train",)
    for client in set("abc") & played.looked.keys():
        own = {("pool", "train"), *((client, split) for split in splits)}
        assert {(domain, split) for domain, split, _ in played.looked[client]} <= own
    for given in played.given.values():
        assert private_parts(reachable(given), rows) == []


@pytest.mark.parametrize("name", ["expert", "flexolmo"])
def test_clients_look_at_all_of_their_own_training_images(name, tiny, rows, tmp_path):
    "In a folder of their own: elsewhere another method may have done the work already."
    played = Watch(find_method(name), tiny.public, tiny.clients[:1], rows, tmp_path / "work")
    assert rows(tiny.a.train) <= played.looked["a"]


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if isinstance(m, OneShot)])
def test_server_gets_what_is_sent_and_nothing_that_leads_to_private_data(name, play, rows):
    played = play(name)
    assert [bundle.client for bundle in played.received] == ["a", "b", "c"]
    for bundle in played.received:
        assert type(bundle) is Bundle and bundle.folder is None and bundle.manifest is None
        assert (bundle.factors != {}) == ("adapter" in played.method.sends)
        assert (bundle.routing is not None) == ("routing" in played.method.sends)
        assert (bundle.ids is not None) == ("proxies" in played.method.sends)
    assert played.remained == [] and private_parts(played.led_to, rows) == []


def test_server_of_other_kinds_gets_participants_all_data_or_nothing(play, tiny, rows):
    others = {n: type(m) for n, m in METHODS.items() if not isinstance(m, OneShot)}
    alone = type(METHODS["zeroshot"])
    assert others == dict(zeroshot=alone, comigs=Rounds) | dict.fromkeys(ALL_DATA, AllData)
    assert play("zeroshot").received == []
    for name in ALL_DATA:
        assert [client.domain for client in play(name).received] == tiny.clients
    # Python hides nothing: a participant has its data in attributes that begin with an underscore,
    # and a server that read them would break the rules. What it offers are its other attributes
    # and what its functions return.
    received = play("comigs").received
    assert [type(participant) for participant in received] == [Participant] * 3
    own = [vars(participant).items() for participant in received]
    offered = reachable([{part: value for part, value in one if part[0] != "_"} for one in own])
    assert private_parts(offered, rows) == [] and Dataset not in map(type, offered)
    assert private_parts(play("zeroshot").led_to, rows) == []


def test_search_for_private_data_would_find_it(tiny, rows):
    def hidden(domain):
        def unify(bundles):
            return domain

        return unify

    for leak in (
        tiny.a,
        [dict(x=(tiny.a.train.select([0]),))],
        hidden(tiny.a),
        partial(hidden, tiny.a),
        replace(tiny.bundles[0], manifest=dict(data=tiny.a.test)),
    ):
        assert private_parts(reachable(tiny.pool, leak), rows)
    harmless = reachable(tiny.pool, tiny.bundles, tiny.pool.train.select([0]))
    assert private_parts(harmless, rows) == []


@every_method
def test_server_looks_at_exactly_the_images_that_the_method_is_about(name, play, tiny, rows):
    played, sample, wanted = play(name), rows(tiny.public.sample), set()
    if "proxies" in getattr(played.method, "sends", ()):
        wanted = rows(proxy_union(played.received, tiny.public))
    if name.startswith("btx"):
        wanted = rows(random_public(tiny.public, 3))
    if name in ("harmomoe", "proxies_only"):
        wanted |= sample
    if name in ALL_DATA:
        wanted = set().union(*(rows(client.train) for client in tiny.clients))
        # it selects the clients' proxies
        wanted |= sample if name == "unrestricted_moe" else rows(tiny.pool.train)
    assert played.looked["server"] == wanted


# ---- counts


@every_method
def test_parameters_are_counted_by_kind(name, play, tiny):
    seed, rank = tiny.seed, tiny.settings.expert.rank
    backbone, expert = sum(p.numel() for p in seed.backbone.parameters()), 0
    for layer in seed.layers:
        ffn = seed.backbone.get_submodule(layer)
        sizes = [getattr(ffn, linear).weight.shape for linear in seed.ffn.linears]
        expert += rank * sum(wide + high for wide, high in sizes)
    for model in members(play(name).model).values():
        total = active = backbone
        if isinstance(model, UnifiedModel):
            line = seed.width + (name in FLEXOLMOS)  # with its bias
            total += len(seed.layers) * (len(model.experts) * line + 1)  # 1 is lambda
            active = total + expert * (1 + (name == "comigs"))
            total += expert * len(set(model.experts) - {"seed"})
        elif isinstance(model, Ensemble):
            posterior = backbone + 3 * (seed.embedding_size + 1)
            total = active = 3 * backbone + posterior * (name == "btm_posterior")
        elif name == "arrow":  # a direction for every adapter in every linear map
            linears = [own.linear for own in model.maps.values()]
            total += 3 * (expert + sum(linear.in_features for linear in linears))
            active = total  # all three are chosen
        elif name in ROUTED:  # all experts read the image before any answers
            total += 3 * expert
            active = total
        assert model.count_parameters() == dict(total=total, active=active)
        assert isinstance(model, UnifiedModel) == (name in MOVES)


def test_two_experts_for_a_token_are_two_experts_that_are_active(tiny, play):
    one = play("harmomoe").model.count_parameters()
    config = changed(untrained(tiny.settings), {"router.top_k": 2})
    model = unify(tiny.bundles, tiny.public.with_config(config))
    two, factors = model.count_parameters(), model.parameter_groups()["factors"]
    assert two["total"] == one["total"] and two["active"] - one["active"] == factors // 3


@every_method
def test_bytes_are_those_of_the_files_that_the_method_sends(name, play, tiny):
    played, sent = play(name), name not in ("zeroshot", *ALL_DATA)
    wanted = [file for part in getattr(played.method, "sends", ()) for file in PARTS[part]]
    sizes = sum(files[file] for files in played.written.values() for file in wanted)
    if name == "comigs":
        layers = played.model.members["a"].layers
        tables = [table for layer in layers for table in (layer.a, layer.b)]
        both = sum(part.numel() for table in tables for part in table.values())
        sizes = tiny.settings.expert.epochs * 3 * both // 2 * 4  # half of it is the specialist's
    assert played.bytes == sizes and (sizes > 0) == sent
