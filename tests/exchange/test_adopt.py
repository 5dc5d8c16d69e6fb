"Experts that were trained elsewhere as clients: the mean of their other changes, and bundles."

import copy
import json
from dataclasses import replace

import pytest
import torch
from exchange.small_decoders import edit, logits, merged, moved
from helpers import routing_of, stamps
from safetensors.torch import load_file

from harmomoe.base.artefacts import stages_run, write_manifest
from harmomoe.baselines.arrow import route_by_directions
from harmomoe.bundle.files import read_bundle
from harmomoe.bundle.manifest import Limits
from harmomoe.client.expert import load_expert
from harmomoe.config.settings import Config, ProxySettings, RoutingSettings, changed
from harmomoe.data.domains import Domain
from harmomoe.data.texts import text_dataset
from harmomoe.describe.public import Public
from harmomoe.describe.routing import client_routing
from harmomoe.exchange.adopt import adopt, average_others, chat_template, example_domain
from harmomoe.exchange.convert import read_adapter, read_checkpoint
from harmomoe.exchange.export import dense_expert, save_adapters, to_mixtral
from harmomoe.exchange.transformers import from_transformers, to_transformers
from harmomoe.models.model import load_model
from harmomoe.moe.router import RouterSettings
from harmomoe.server.merge import merge

# The mean of other changes


def test_the_mean_of_attention_is_added_to_the_seed(seed, foreign):
    folder, model = foreign(target_modules="all-linear")
    before, after = seed.backbone.state_dict(), copy.deepcopy(model).merge_and_unload().state_dict()
    kept = read_adapter(folder, seed, "average")
    assert seed.identity  # whose digest is kept from now on, and must not pass to the copy
    changed, (alone,) = average_others(seed, [kept])
    assert torch.allclose(logits(merged(changed, alone)), logits(model), atol=1e-4)
    assert changed.identity["weights"] != seed.identity["weights"] and not alone.others
    # it counts as a client that changed nothing
    nothing = read_adapter(foreign("plain")[0], seed, "average")
    halved = average_others(seed, [kept, nothing])[0].backbone.state_dict()
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.allclose(halved[name], (before[name] + after[name]) / 2, atol=1e-6)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(halved[name], before[name])


def test_a_fine_tuned_model_is_its_expert_on_the_changed_seed(seed):
    backbone = moved(seed, ("mlp", "self_attn", "norm"))
    before, after = seed.backbone.state_dict(), backbone.state_dict()
    expert = read_checkpoint(backbone, seed, None, "average")
    changed, (alone,) = average_others(seed, [expert])
    assert torch.allclose(logits(merged(changed, alone)), logits(backbone), atol=1e-4)
    for name, weight in changed.backbone.state_dict().items():
        assert torch.allclose(weight, before[name] if ".mlp." in name else after[name], atol=1e-6)


def test_tied_embeddings_change_once(decoder, tmp_path):
    tied = decoder(tie_word_embeddings=True)
    backbone = moved(tied, ("mlp", "embed"))
    backbone.save_pretrained(tmp_path)
    for source in (backbone, tmp_path):
        expert = read_checkpoint(source, tied, None, "average")
        changed, (alone,) = average_others(tied, [expert])
        assert torch.allclose(logits(merged(changed, alone)), logits(backbone), atol=1e-4)


def test_tied_weights_may_have_another_name_with_every_expert(decoder):
    tied = decoder("gemma2")
    experts = [read_checkpoint(moved(tied, ("mlp", "embed")), tied, None, "average")] * 2
    [(name, change)] = experts[0].others.items()
    assert name == "model.embed_tokens.weight"
    experts[1] = replace(experts[1], others={"lm_head.weight": change})
    averaged, _ = average_others(tied, experts)
    before, after = tied.whole.state_dict(), averaged.whole.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.allclose(after[name], before[name] + change, atol=1e-6)


def test_a_whole_clip_changes_with_its_text_tower(tiny_seed, tmp_path):
    words = copy.deepcopy(tiny_seed)
    for p in (*words.backbone.parameters(), words.clip.token_embedding.weight):
        p.data += 0.1 * torch.randn(p.shape)
    words.save(tmp_path)
    expert = read_checkpoint(tmp_path, tiny_seed, None, "average")
    changed, (alone,) = average_others(tiny_seed, [expert])
    found, expected = changed.clip.state_dict(), words.clip.state_dict()
    for name in ("token_embedding.weight", "visual.conv1.weight"):
        assert torch.allclose(found[name], expected[name], atol=1e-6)


# Bundles


@pytest.fixture
def own(tiny):
    "What client a sent, and its expert as somebody else would read it."
    return tiny.bundles[0], read_adapter(tiny.bundles[0].folder / "adapter", tiny.seed)


def test_a_clients_own_expert_is_adopted_as_it_was(tiny, own, tmp_path):
    sent, expert = own
    folder = adopt(expert, tiny.a, tiny.public, tmp_path / "a")
    assert folder == tmp_path / "a" / "bundle"
    bundle = read_bundle(folder, tiny.public)
    assert (bundle.client, bundle.scale, bundle.rank) == (sent.client, sent.scale, sent.rank)
    assert bundle.ids.tolist() == sent.ids.tolist()
    for place, pair in sent.factors.items():
        assert all(torch.equal(*both) for both in zip(pair, bundle.factors[place]))
    assert bundle.manifest.facts.private_samples == len(tiny.a.train)
    settings = bundle.manifest.inputs.settings
    told = {name: settings[name] for name in ("rank", "alpha", "expert")}
    assert told == dict(rank=4, alpha=8, expert="trained elsewhere")


def test_what_was_done_is_not_done_again_and_other_data_need_other_vectors(tiny, own, tmp_path):
    expert, folder = own[1], tmp_path / "a"
    adopt(expert, tiny.a, tiny.public, folder)
    before = stamps(tmp_path)
    with stages_run() as ran:
        first = read_bundle(adopt(expert, tiny.a, tiny.public, folder), tiny.public)
    assert ran == [] and stamps(tmp_path) == before and len(before) >= 4
    fewer = replace(tiny.a, train=tiny.a.train.select(range(12)))
    with stages_run() as ran:
        second = read_bundle(adopt(expert, fewer, tiny.public, folder), tiny.public)
    assert "routing" in ran and "proxies" in ran
    assert not torch.equal(routing_of(first).vectors, routing_of(second).vectors)
    fresh = read_bundle(adopt(expert, fewer, tiny.public, tmp_path / "fresh"), tiny.public)
    assert torch.equal(routing_of(second).vectors, routing_of(fresh).vectors)


@pytest.mark.parametrize("form", ["logistic", "moments", "activation", "evidence"])
def test_density_ratios_are_those_that_a_client_computes(tiny, own, form, tmp_path):
    "Proxies, which an adopted expert has not seen, have no part in these forms."
    public = tiny.public.with_config(changed(tiny.settings, {"router.form": form}))
    bundle = read_bundle(adopt(own[1], tiny.a, public, tmp_path / "a"), public)
    theirs = routing_of(tiny.sent[form][0])
    assert torch.allclose(routing_of(bundle).vectors, theirs.vectors, atol=1e-4)
    assert torch.allclose(routing_of(bundle).biases, theirs.biases, atol=1e-4)


def test_proxies_that_nobody_learns_from_are_random_and_cost_nothing(tiny, own, tmp_path):
    public = tiny.public.with_config(changed(tiny.settings, {"finetune.epochs": 0}))
    with stages_run() as ran:
        bundle = read_bundle(adopt(own[1], tiny.a, public, tmp_path / "a"), public)
    assert set(ran) == {"expert", "routing"}
    fewer = replace(tiny.a, train=tiny.a.train.select(range(12)))
    other = read_bundle(adopt(own[1], fewer, public, tmp_path / "fewer"), public)
    named = read_bundle(adopt(own[1], tiny.a.name, public, tmp_path / "named"), public)
    # nothing but the name decides
    assert bundle.ids.tolist() == other.ids.tolist() == named.ids.tolist()
    assert len(bundle.ids) == len(own[0].ids) and bundle.ids.tolist() != own[0].ids.tolist()


def test_means_are_those_of_private_samples_alone(tiny, own, tmp_path):
    sent, expert = own
    found = routing_of(read_bundle(adopt(expert, tiny.a, tiny.public, tmp_path / "a"), tiny.public))
    backbone = load_expert(tiny.seed, sent.folder)
    alone = client_routing("mean", tiny.seed, backbone, tiny.a.train)
    assert torch.allclose(found.vectors, alone.vectors, atol=1e-5)
    assert not torch.allclose(found.vectors, routing_of(sent).vectors, atol=1e-3)


@pytest.mark.parametrize(
    "form", ["mean", "logistic", "moments", "activation", "evidence", "random"]
)
def test_a_name_alone_gives_random_vectors_and_proxies(tiny, own, tmp_path, form):
    public = tiny.public.with_config(changed(tiny.settings, {"router.form": form}))
    named = [("cats", "1"), ("cats", "2"), ("dogs", "3")]
    folders = [adopt(own[1], name, public, tmp_path / where) for name, where in named]
    made = [read_bundle(folder, public) for folder in folders]
    routing, facts = routing_of(made[0]), made[0].manifest.facts
    assert routing.form == ("mean" if form == "random" else form) and not routing.biases.any()
    assert (facts.client, facts.private_samples, facts.proxies) == ("cats", 0, 12)
    assert torch.equal(routing.vectors, routing_of(made[1]).vectors)
    first, second, other = (bundle.ids.tolist() for bundle in made)
    assert first == second != other and len(first) == 12
    assert not torch.equal(routing.vectors, routing_of(made[2]).vectors)
    assert 0.01 < routing.vectors.std() < 0.03


@pytest.fixture(scope="module")
def text_pool(tokenizer):
    rows = [dict(instruction=f"Name {n} things.", output="One.", input="") for n in range(40)]
    samples = text_dataset(rows, "pool")
    return Domain("pool", samples, samples.select([]), samples.select([]))


@pytest.fixture(scope="module")
def text_public(seed, text_pool, tmp_path_factory):
    "What everybody has who adopts adapters of the small Llama."
    config = Config(
        proxies=ProxySettings(candidates=30, number=6),
        routing=RoutingSettings(40),
        router=RouterSettings(form="logistic"),
    )
    return Public(seed, text_pool, config, tmp_path_factory.mktemp("public"))


def test_example_prompts_stand_for_data(seed, foreign, text_public, tmp_path):
    expert = read_adapter(foreign()[0], seed)
    domain = example_domain("law", [f"Is clause {n} void?" for n in range(12)])
    assert len(domain.train) == 12 and not len(domain.test) and domain.train[0]["answer"] == ""
    bundle = read_bundle(adopt(expert, domain, text_public, tmp_path / "law"), text_public)
    assert routing_of(bundle).form == "logistic" and routing_of(bundle).biases.all()
    assert len(bundle.ids) == 6 and bundle.manifest.facts.private_samples == 12
    few = example_domain("few", ["Is it?"])
    with pytest.raises(ValueError, match="at least 10 private"):
        adopt(expert, few, text_public, tmp_path / "few")
    with pytest.raises(ValueError, match="row 1: the prompt is empty or ends in a blank"):
        example_domain("law", ["Is it?", "Is it "])


@pytest.fixture
def chatty(decoder, tokenizer):
    "A function (template) -> a seed whose tokenizer has it."

    def build(template, begins=False):
        seed = decoder()
        seed.tokenizer = copy.deepcopy(tokenizer)
        seed.tokenizer.chat_template = template
        if begins:  # as Llama's does
            from tokenizers.processors import TemplateProcessing

            how = dict(single="<s> $A", special_tokens=[("<s>", 1)])
            seed.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**how)
        return seed

    return build


MARKS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<assistant>\\n' }}"


def test_prompts_are_put_into_a_chat_template_and_may_end_in_a_line_break(chatty):
    domain = example_domain("law", ["Is it void?"], chat_template(chatty(MARKS)))
    [sample] = domain.train
    assert (sample["prompt"], sample["answer"]) == ("<user>Is it void?\n<assistant>\n", "")
    again = example_domain("law", [sample["prompt"]])
    assert again.train["prompt"][:] == [sample["prompt"]]


@pytest.mark.parametrize("begins", [False, True])
def test_a_text_begins_once(chatty, begins):
    "A template and a tokenizer may both write a beginning of text."
    seed = chatty("{{ bos_token }}" + MARKS, begins)
    prompt = chat_template(seed)([dict(role="user", content="Void?")])
    ids, _ = seed.encode(prompt, "")
    assert ids.count(1) == 1 and ids[0] == 1


def test_what_a_template_refuses_is_an_error_of_its_row(chatty, seed):
    with pytest.raises(ValueError, match="small-llama has no chat template"):
        chat_template(seed)
    strict = chatty("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="row 0: the chat template of .*roles must alternate"):
        example_domain("law", ["Is it void?"], chat_template(strict))


# Attention


@pytest.fixture
def both(seed, foreign, text_public, tmp_path):
    "Bundles of an adapter of everything and of one of queries and values; PEFT's models of them."
    found, models = [], {}
    for name, targets in dict(law="all-linear", code=["q_proj", "v_proj"]).items():
        folder, models[name] = foreign(name, target_modules=targets, random_state=len(name))
        domain = example_domain(name, [f"{name} {n}: is it void?" for n in range(12)])
        expert = read_adapter(folder, seed)
        found.append(read_bundle(adopt(expert, domain, text_public, tmp_path / name), text_public))
    return found, models


def test_attention_comes_through_a_bundle_into_one_model(seed, both, text_public, tmp_path):
    bundles, models = both
    assert [len(bundle.factors) for bundle in bundles] == [14, 10]
    model = merge(bundles, text_public)
    assert model.attention == ["q_proj", "k_proj", "v_proj", "o_proj"] and len(model.maps) == 8
    rows = sum(model.ranks)
    of_maps = sum(rows * sum(part.linear.weight.shape) for part in model.maps.values())
    assert sum(p.numel() for part in model.maps.values() for p in (part.a, part.b)) == of_maps
    assert model.count_parameters()["total"] > of_maps + sum(
        p.numel() for p in seed.backbone.parameters()
    )
    model.save(tmp_path / "one")
    opened = load_model(tmp_path / "one")
    assert opened.attention == model.attention
    assert torch.equal(logits(opened.backbone), logits(model.backbone))
    theirs = to_transformers(opened)
    back = from_transformers(theirs, seed.tokenizer)
    assert back.seed.identity["weights"] == seed.identity["weights"]
    for one in (model, opened, back):
        for name, alone in models.items():
            with one.only(name):
                assert torch.allclose(logits(one.backbone), logits(alone), atol=1e-4)
            assert torch.allclose(logits(dense_expert(one, name)), logits(alone), atol=1e-4)
        with one.only("seed"):
            assert torch.allclose(logits(one.backbone), logits(seed.backbone), atol=1e-5)
    saved = save_adapters(opened, tmp_path / "out")
    for name, alone in models.items():
        again = merged(seed, read_adapter(saved[name], seed))
        assert torch.allclose(logits(again), logits(alone), atol=1e-4)
    with pytest.raises(ValueError, match="experts change attention, too"):
        to_mixtral(model, drop_context=True)


def test_a_bundle_without_attention_is_what_it_was(seed, foreign, both, text_public, tmp_path):
    expert = read_adapter(foreign("plain")[0], seed)
    domain = example_domain("plain", [f"plain {n}?" for n in range(12)])
    plain = read_bundle(adopt(expert, domain, text_public, tmp_path / "plain"), text_public)
    assert merge([plain], text_public).attention == []
    mixed = merge([*both[0], plain], text_public)
    mine = mixed.layers[0].owner == mixed.experts.index("plain")
    for part in mixed.maps.values():
        assert mine.any() and not part.a[mine].any() and not part.b[mine].any()


def test_attention_in_a_bundle_is_checked(both, text_public, tmp_path):
    folder, key = (
        both[0][1].folder,
        "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight",
    )

    def spoilt(change):
        edit(folder / "adapter", "adapter_model.safetensors", change)
        said = json.loads((folder / "manifest.json").read_text())
        write_manifest(folder, said["kind"], said["inputs"], **said["facts"])
        return folder

    with pytest.raises(ValueError, match="q_proj.*; the server takes experts that change FFNs al"):
        read_bundle(folder, text_public, Limits(attention=False))
    whole = load_file(folder / "adapter" / "adapter_model.safetensors")
    wrong = {
        "v_proj has factors": lambda t: t.update({key: t[key][:2].clone()}),
        "v_proj is not finite": lambda t: t.update({key: t[key] * torch.nan}),
        "v_proj are so large": lambda t: t.update({key: t[key] * 1e9}),
        "lacks the tensor .*not trained on the v_proj in all layers": lambda t: t.pop(key),
        "w_proj.*no map of attention that can be routed": lambda t: t.update(
            {key.replace("v_proj", "w_proj"): t[key].clone()}
        ),
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            read_bundle(spoilt(lambda t: (t.clear(), t.update(whole), change(t))), text_public)
    assert read_bundle(spoilt(lambda t: (t.clear(), t.update(whole))), text_public).rank == 4


def test_arrow_routes_attention_by_its_directions(both, text_public, tmp_path):
    model = route_by_directions(both[0], text_public)
    assert len(model.maps) == 14
    model.save(tmp_path / "arrow")
    opened = load_model(tmp_path / "arrow")
    assert torch.equal(logits(opened.backbone), logits(model.backbone))


def test_changes_besides_ffns_are_averaged_before_a_bundle(seed, text_public, tmp_path):
    expert = read_checkpoint(moved(seed, ("mlp", "attn")), seed, 4, "average")
    with pytest.raises(ValueError, match="average_others"):
        adopt(expert, "law", text_public, tmp_path / "law")
    assert not (tmp_path / "law").exists()
    averaged, (expert,) = average_others(seed, [expert])
    public = Public(averaged, text_public.pool, text_public.config, tmp_path / "public")
    folder = adopt(expert, "law", public, tmp_path / "law")
    assert read_bundle(folder, public).client == "law"
    with pytest.raises(ValueError, match="another seed"):
        read_bundle(folder, text_public)
