"The unified model: what its layers compute, who takes part, how many numbers it has, its folder."

import copy
import json
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from helpers import routing_of
from networks import close, embed, moved, same, weights
from safetensors.torch import load_file, save_file

from harmomoe.base.artefacts import digest, read_manifest
from harmomoe.client.expert import load_expert
from harmomoe.config.settings import changed
from harmomoe.data.texts import text_dataset
from harmomoe.describe.routing import RoutingVectors, form_means, log_ratios, public_units
from harmomoe.models.decoder import DecoderSeed, Scoring, untrained_decoder
from harmomoe.models.evaluate import measure
from harmomoe.models.model import Model, load_model, read_model
from harmomoe.models.observe import observe_routing
from harmomoe.models.unified import Contribution, MoEFacts, UnifiedModel
from harmomoe.moe.router import RouterSettings
from harmomoe.moe.stored import stored_rows
from harmomoe.server.finetune import finetune

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
EVERY = [
    dict(),
    dict(top_k=2),
    dict(top_k=4),
    dict(top_k=3, norm_topk_prob=True),
    dict(seed_expert=False),
    dict(shared_lam=True),
    dict(lam=1.0),
    dict(lam=0.0, learn_lam=False),
    dict(form="random"),
    dict(form="logistic"),
    dict(form="logistic", top_k=2, seed_expert=False, shared_lam=True),
    dict(form="moments"),
    dict(form="moments", top_k=2, seed_expert=False, lam=1.0),
    dict(form="moments", top_k=3, norm_topk_prob=True, shared_lam=True, learn_lam=False),
    dict(form="evidence"),
    dict(form="evidence", top_k=2, seed_expert=False),
    dict(form="evidence", top_k=3, norm_topk_prob=True, seed_logit=-2.0),
    dict(top_k=3, seed_expert=False, shared_lam=True),
]
NAMES = [" ".join(f"{k}={v}" for k, v in settings.items()) or "default" for settings in EVERY]
every_router = pytest.mark.parametrize("settings", EVERY, ids=NAMES)


@pytest.fixture(scope="module")
def tune(tiny):
    "A function that fine-tunes a model for an epoch of 12 samples."
    public = tiny.public.with_config(changed(tiny.settings, {"finetune.epochs": 1}))

    def run(model):
        finetune(model, tiny.pool.test, public)
        return model

    return run


def new_model(tiny, **settings):
    "Untrained experts of ranks 4 and 2 beside the seed's own FFN."
    names, ranks, scales = ["seed", "a", "b"], [0, 4, 2], [0.0, 2.0, 1.0]
    return UnifiedModel(tiny.seed, names, ranks, scales, RouterSettings(**settings))


# ---- what a layer computes


def look(layer, z):
    "What a layer of evidence says of samples: [B, E]."
    router, h = layer.router, F.gelu(layer.ffn.c_fc(z))
    seen = [part for x in (z, h) for part in (x.mean(1), (x.var(1, correction=0) + 1e-6).sqrt())]
    u = ((torch.cat(seen, 1) - router.center) / router.scale).clamp(-3, 3)
    return torch.cat([u, u * u], 1) @ router.vectors.T + router.biases


def logits(layer, z, settings):
    "The exponents of Eq. 6 word by word, where a layer needs no other one."
    (e, f), lam = layer.router.vectors.tensor_split([64], 1), layer.router.lam
    assert f.shape[1] == 64 * (settings.form == "moments")
    logits = ((1 - lam) * z + lam * z.mean(1, keepdim=True)) @ e.T
    if settings.form == "moments":
        logits = logits + lam * (z.var(1, keepdim=True, correction=0) + 1e-6).sqrt() @ f.T
    if settings.sent_form != "mean":
        logits = logits + layer.router.biases
    return logits


def gates(layer, z, settings, looks):
    "The weight of every expert for every token; the looks of the layers before are added to."
    if settings.form == "evidence":
        looks.append(look(layer, z))
        pi = torch.stack(looks).mean(0)[:, None].expand(*z.shape[:2], -1).softmax(-1)
    else:
        pi = logits(layer, z, settings).softmax(-1)
    pi = torch.where(pi >= pi.topk(settings.top_k, dim=-1).values[..., -1:], pi, 0.0)
    return pi / pi.sum(-1, keepdim=True) if settings.norm_topk_prob else pi


@pytest.fixture(scope="module")
def dense_experts(tiny):
    "The backbones of the seed and of the three experts, as PEFT merges them."
    folders = [bundle.folder for bundle in tiny.bundles]
    return [tiny.seed.backbone, *(load_expert(tiny.seed, folder) for folder in folders)]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [(1, 1), (3, 5), (16, 9)], ids=str)
@every_router
def test_layer_is_the_weighted_sum_of_dense_experts(
    settings, tokens, merge_with, dense_experts, tiny
):
    model = merge_with(**settings)
    z, looks = torch.randn(*tokens, 64, generator=torch.Generator().manual_seed(0)), []
    for path, layer in zip(tiny.seed.layers, model.layers):
        layer.tile = 50  # so that many tokens, which go in groups, are several tiles
        ffns = [expert.get_submodule(path) for expert in dense_experts[-len(model.experts) :]]
        pi = gates(layer, z, model.settings, looks)
        expected = sum(pi[..., p, None] * ffn(z) for p, ffn in enumerate(ffns))
        assert close(layer(z), expected, 1e-4)


def test_layers_leave_low_rank_inputs_out_in_training_only(merge_with):
    layer = merge_with(top_k=2).layers[0]
    z = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))

    def passes(dropout, mode):
        layer.dropout = dropout
        layer.train(mode)
        torch.manual_seed(0)
        with torch.no_grad():
            return [layer(z) for _ in range(2)]

    still, _ = passes(0.0, False)
    for dropout, mode in ((0.0, True), (0.5, False), (1.0, False)):
        assert all(torch.equal(y, still) for y in passes(dropout, mode))
    one, two = passes(0.5, True)
    assert not close(one, two) and not close(one, still)
    assert torch.equal(passes(0.5, True)[0], one)
    with torch.no_grad():
        for b in layer.b.values():
            b.zero_()
    bare, _ = passes(0.0, False)
    assert torch.equal(passes(0.5, True)[0], bare)  # the shared FFN sees all
    assert not close(bare, still)


# ---- who takes part


def test_only_one_expert_is_that_expert_and_only_the_seed_is_the_seed(merge_with, tiny):
    data = tiny.pool.test
    for top_k in (1, 3):
        model = merge_with(top_k=top_k)
        before = embed(model, data)
        for bundle in tiny.bundles:
            expected = embed(bundle.expert(tiny.seed), data)
            assert not close(expected, before)
            with model.only(bundle.client) as one:
                assert one is model and close(embed(one, data), expected)
        with model.only("seed"):
            assert close(embed(model, data), tiny.seed.embed(data))
        assert torch.equal(embed(model, data), before)


def test_only_is_undone_after_an_error_and_can_be_nested(merge_with, tiny):
    model = merge_with(top_k=2)
    with pytest.raises(KeyError), model.only("a", "b"):
        with model.only("c"):
            assert observe_routing(model, tiny.pool.test).load[:, 3].tolist() == [1, 1]
            assert [layer.router.top_k for layer in model.layers] == [1, 1]  # nobody works for 0
        load = observe_routing(model, tiny.pool.test).load
        assert (load[:, 1:3] > 0).all() and not load[:, [0, 3]].any()
        raise KeyError
    assert all(layer.router.active is None and layer.router.top_k == 2 for layer in model.layers)


def test_only_refuses_nobody_and_unknown_names(merge_with):
    model, known = merge_with(), "this model has seed, a, b, c"
    for names, said in ((("a", "d"), f"no expert 'd'; {known}"), ((), "name at least one expert")):
        with pytest.raises(ValueError, match=said), model.only(*names):
            pass


def test_without_the_seed_expert_the_seed_gets_no_tokens(merge_with, tiny):
    model = merge_with(seed_expert=False)
    assert model.experts == ["a", "b", "c"]
    assert observe_routing(model, tiny.pool.test).load.shape == (2, 3)
    with pytest.raises(ValueError, match="no expert 'seed'"), model.only("seed"):
        pass


# ---- who takes part, sample by sample


WHO = [["a"], ["seed", "b"], ["seed", "a", "b", "c"], ["c", "b", "a"]] * 3  # of 12 samples


@every_router
def test_each_sample_of_a_batch_is_what_it_is_alone_with_its_members(settings, merge_with, tiny):
    model, data = merge_with(**settings), tiny.pool.test
    rows = [[name for name in row if name in model.experts] for row in WHO]
    before = embed(model, data)
    with model.only(rows=rows) as one:
        assert one is model
        together = embed(model, data)
    assert torch.equal(embed(model, data), before)
    for place, names in enumerate(rows):
        with model.only(*names):
            alone = embed(model, data.select([place]))[0]
        assert close(together[place], alone)
    assert not close(together[0], before[0])


def test_one_list_for_all_samples_is_only_to_the_last_bit(merge_with, tiny):
    model, data = merge_with(top_k=2), tiny.pool.test
    with model.only("a", "c"):
        expected = embed(model, data)
    with model.only(rows=[("c", "a", "c")] * 12):
        assert torch.equal(embed(model, data), expected)
        with model.only("b"):
            inner = embed(model, data)
        assert torch.equal(embed(model, data), expected)
    with model.only("b"):
        assert torch.equal(embed(model, data), inner)


def test_routing_of_a_batch_with_rows_goes_to_members_only(merge_with, tiny):
    model = merge_with(top_k=3)
    with model.only(rows=[["a"], ["c"]] * 6):
        load = observe_routing(model, tiny.pool.test).load
    assert close(torch.tensor(load[:, [1, 3]]), torch.tensor(0.5).double())
    assert not load[:, [0, 2]].any()


def test_a_batch_of_another_size_than_rows_is_one_clear_error(merge_with, tiny):
    model, data, classes = merge_with(top_k=2), tiny.pool.test, tiny.pool.classes
    with model.only(rows=WHO):
        whole = measure(model, data, classes)
        told = r"given as \[12, 4\], but this pass has 5 samples and 4 experts"
        with pytest.raises(ValueError, match=told):
            measure(model, data, classes, batch_size=5)
    parts = []
    for start in (0, 5, 10):
        with model.only(rows=WHO[start : start + 5]):
            part = data.select(range(start, min(start + 5, 12)))
            parts.append(measure(model, part, classes))
    assert sum(part.correct for part in parts) == whole.correct


REFUSED = [
    (("a",), [["b"]], "names, for all samples, or rows, for each sample, but not both"),
    ((), [], "rows is empty"),
    ((), ["ab"], "row 0 is 'ab', but must be a list of names"),
    ((), [["a"], None], "row 1 is None, but must be a list"),
    ((), [["a"], []], "row 1: name at least one expert; this model has seed, a, b, c"),
    ((), [["a"], ["b", "d"]], "row 1: no expert 'd'; this model has seed, a, b, c"),
    ((), [["a"], [3, "b"]], "row 1: no expert 3"),
]


@pytest.mark.parametrize("names, rows, told", REFUSED, ids=[told for _, _, told in REFUSED])
def test_rows_that_cannot_be_are_refused_and_change_nothing(names, rows, told, merge_with):
    model = merge_with()
    with pytest.raises(ValueError, match=told), model.only(*names, rows=rows):
        pass
    assert all(layer.router.active is None for layer in model.layers)


def test_rows_are_undone_after_an_error(merge_with):
    model = merge_with(top_k=3)
    with pytest.raises(KeyError), model.only(rows=[["a"], ["b", "c"]]):
        assert [layer.router.top_k for layer in model.layers] == [2, 2]
        raise KeyError
    assert all(layer.router.active is None and layer.router.top_k == 3 for layer in model.layers)


QUESTIONS = [
    dict(question="Which of them barks at night?", choices=["a dog", "a very old owl"], answer="A"),
    dict(question="What do bees make?", choices=["tea", "honey", "raw silk"], answer="B"),
    dict(question="Who reads?", choices=["the door", "one", "ink of any kind"], answer="B"),
    dict(question="Where is the small red boat?", choices=["on a lake", "in it"], answer="A"),
]


@pytest.mark.parametrize("scoring", get_args(Scoring))
@pytest.mark.parametrize("context", ["prefix", "prompt", "sequence"])
def test_questions_have_members_of_their_own_in_whatever_order_they_are_read(scoring, context):
    data = text_dataset(QUESTIONS, "questions")
    small = untrained_decoder([data], initializer_range=0.3)
    seed = DecoderSeed(small.model, small.tokenizer, "small", scoring)
    settings = RouterSettings(top_k=2, context=context, form="logistic")
    model = UnifiedModel(seed, ["seed", "a", "b"], [0, 4, 2], [0.0, 2.0, 1.0], settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.layers:
            router = layer.router
            for p in (*layer.a.values(), *layer.b.values(), router.vectors, router.biases):
                p.normal_(std=0.3)
    letters, rows = data.features["label"].names, [["a"], ["b"], ["seed", "a", "b"], ["seed", "b"]]
    score, batch = model.scorer(letters), next(iter(seed.batches(data, letters)))
    with torch.no_grad():
        free = score(batch)
        with model.only(rows=rows):
            together = score(batch)
            with pytest.raises(ValueError, match="4 rows of members|given as .4, 3."):
                score(next(iter(seed.batches(data.select(range(3)), letters))))
        assert torch.equal(score(batch), free)
        for place, names in enumerate(rows):
            with model.only(*names):
                alone = score(next(iter(seed.batches(data.select([place]), letters))))[0]
            there = alone.isfinite()
            assert close(together[place][there], alone[there], 1e-4)
            assert torch.equal(together[place].isfinite(), there)
            if names != model.experts:
                assert not close(together[place][there], free[place][there], 1e-3)


# ---- one lambda for all layers


def test_shared_lam_is_one_number_for_all_layers_also_after_training_and_loading(
    merge_with, tune, tmp_path
):
    model, apart = tune(merge_with(shared_lam=True)), tune(merge_with())
    assert len({layer.router.lam.item() for layer in apart.layers}) == 2
    for one in (model, load_model(model.save(tmp_path / "model"))):
        first, second = (layer.router.lam for layer in one.layers)
        assert first is second and first.item() not in (pytest.approx(0.3, abs=1e-9), 0, 1)
        assert first.item() == model.layers[0].router.lam.item()
    assert apart.parameter_groups()["routers"] - model.parameter_groups()["routers"] == 1


def test_shared_lam_of_zero_is_shared_too(merge_with):
    first, second = (layer.router.lam for layer in merge_with(shared_lam=True, lam=0.0).layers)
    assert first is second


# ---- new experts


@pytest.mark.parametrize(
    "settings",
    [dict(top_k=3), dict(norm_topk_prob=True), dict(top_k=2, norm_topk_prob=True)],
    ids=str,
)
def test_new_experts_leave_the_seeds_outputs_as_they_are(settings, tiny):
    "Where the weights of a token's experts sum to one."
    model = new_model(tiny, **settings)
    assert model.start_experts(dropout=0.2, random_state=5) is model
    assert {layer.dropout for layer in model.layers} == {0.2}
    assert close(embed(model, tiny.pool.test), tiny.seed.embed(tiny.pool.test))


def test_new_experts_start_as_in_lora_by_the_random_state_alone_and_learn(tiny, tune):
    start = lambda state: new_model(tiny, top_k=3).start_experts(random_state=state)
    torch.manual_seed(1)
    one, outer = start(5), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), outer)  # the global generator is left alone
    assert same(start(5).backbone, one.backbone)
    drawn = [(a, layer.b[name]) for layer in one.layers for name, a in layer.a.items()]
    others = [a for layer in start(6).layers for a in layer.a.values()]
    for (a, b), other in zip(drawn, others):
        bound = a.shape[1] ** -0.5
        assert 0.9 * bound < a.abs().max() <= bound
        assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
        assert not b.any() and (a != other).all()
    tune(one)
    assert all(b.abs().sum(1).all() for _, b in drawn)


def test_dropout_of_a_new_model_waits_for_training(merge_with, tiny):
    model = merge_with(top_k=2)
    before = embed(model, tiny.a.test)
    for layer in model.layers:
        layer.dropout = 0.5
    assert torch.equal(embed(model, tiny.a.test), before)
    model.backbone.train()
    assert not close(embed(model, tiny.a.test), before)


def training(model):
    return {name for name, module in model.backbone.named_modules() if module.training}


@pytest.mark.parametrize(
    "settings", [dict(), dict(form="moments", top_k=2, shared_lam=True)], ids=str
)
def test_every_part_of_a_model_is_ready_for_inference_when_it_is_made_and_when_it_is_loaded(
    settings, merge_with, tiny, tmp_path
):
    model, new = merge_with(**settings), new_model(tiny, **settings)
    assert len(list(model.backbone.modules())) > 20 and training(model) == training(new) == set()
    assert training(new.start_experts(dropout=0.5)) == set()
    assert new.backbone.training is False and all(not layer.training for layer in new.layers)
    model.backbone.train()  # as it was left has no part in what is loaded
    assert training(load_model(model.save(tmp_path / "model"))) == set()
    assert training(merge_with(**settings)) == set()  # nor in what is made of the same seed
    assert not any(module.training for module in tiny.seed.backbone.modules())


# ---- evidence that adds up


@torch.no_grad()
def probabilities(model, data, batch_size=None):
    "What the routers of a pass would say if everybody took part: [layers, n, E]."
    found = [[] for _ in model.layers]

    def watch(rows):
        def note(router, inputs, output):
            kept, router.active = router.active, None
            rows.append(router.probabilities(*inputs))
            router.active = kept

        return note

    pairs = zip(model.layers, found)
    handles = [layer.router.register_forward_hook(watch(rows)) for layer, rows in pairs]
    for batch in model.seed.batches(data, batch_size=batch_size):
        model.seed.hidden(model.backbone, batch)
    for handle in handles:
        handle.remove()
    for rows in found:  # one decision for all tokens
        assert all(torch.equal(row, row[:, :1].expand_as(row)) for row in rows)
        rows[:] = [row[:, 0] for row in rows]
    return torch.stack([torch.cat(rows) for rows in found])


@pytest.mark.parametrize("seed_logit", [0.0, -1.5, 3.0])
def test_routers_say_the_log_ratios_that_clients_estimated(seed_logit, merge_with, tiny):
    """Of samples that only the seed's own expert has processed: their representations are those
    that `form_means` finds in the seed."""
    model, data = merge_with(form="evidence", seed_logit=seed_logit), tiny.a.test
    means = form_means("evidence", tiny.seed, tiny.seed.backbone, data)
    ratios = [tiny.public.log_ratios(routing_of(one), means) for one in tiny.evidence]
    wanted = torch.stack([torch.full_like(ratios[0], seed_logit), *ratios], -1).softmax(-1)
    with model.only("seed"):
        found = probabilities(model, data)
    assert torch.allclose(found.double(), wanted, atol=1e-4)
    assert (found[1] - found[0]).abs().max() > 0.01 and found.min() < 0.2 < 0.8 < found.max()


@pytest.mark.parametrize("context", ["sequence", "prompt"])
def test_routers_of_texts_say_the_log_ratios_too(context):
    "With padding, a gated FFN, and the prompt as all that counts."
    data = text_dataset(QUESTIONS, "questions")
    small = untrained_decoder([data], initializer_range=0.3)
    seed = DecoderSeed(small.model, small.tokenizer, "small", "letter")
    settings = RouterSettings(top_k=2, context=context, form="evidence")
    model = UnifiedModel(seed, ["seed", "a", "b"], [0, 4, 2], [0.0, 2.0, 1.0], settings)
    means = form_means("evidence", seed, seed.backbone, data, context)
    units, layers = public_units(means), len(seed.layers)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(layers, 3, 2 * means.shape[-1], generator=generator) / 9
    biases = torch.randn(layers, 3, generator=generator)
    model.start_routers(vectors, biases, units)
    sent = [RoutingVectors(vectors[:, p], biases[:, p], "evidence") for p in range(3)]
    wanted = torch.stack([log_ratios(one, means, units) for one in sent], -1).softmax(-1)
    with model.only("seed"):
        for batch_size in (4, 1):
            found = probabilities(model, data, batch_size)
            assert torch.allclose(found.double(), wanted, atol=1e-3)
    assert layers > 1 and (found[1] - found[0]).abs().max() > 0.1


def test_the_members_choose_otherwise_where_they_have_processed_a_sample(merge_with, tiny):
    model = merge_with(form="evidence", seed_expert=False)
    with model.only("a"):
        own = probabilities(model, tiny.a.test)
    with model.only("b"):
        other = probabilities(model, tiny.a.test)
    assert torch.equal(own[0], other[0])  # before the first expert, all are alike
    assert (own[1] - other[1]).abs().max() > 1e-3
    with model.only(rows=[["a"], ["b"]] * 6):
        both = probabilities(model, tiny.a.test)
    assert close(both[:, ::2], own[:, ::2]) and close(both[:, 1::2], other[:, 1::2])


def evidence(merge_with, **settings):
    return merge_with(form="evidence", **dict(top_k=2) | settings)


def chained(model):
    routers = [layer.router for layer in model.layers]
    return [router.earlier for router in routers] == [[], routers[:1]]


def test_samples_are_what_they_are_alone_in_whatever_batches_they_come(merge_with, tiny):
    model, data = evidence(merge_with), tiny.a.test
    whole = probabilities(model, data, 12)
    for batch_size in (5, 1, 12):
        assert close(probabilities(model, data, batch_size), whole)
    first = embed(model, data)
    assert torch.equal(embed(model, data), first)
    assert close(embed(model, data.select([7]))[0], first[7])
    assert torch.equal(embed(model, data), first)


@pytest.mark.parametrize("copied", ["deepcopy", "pickled", "loaded"])
def test_copies_of_evidence_add_up_by_themselves(copied, merge_with, tiny, tmp_path):
    model, data = evidence(merge_with), tiny.a.test
    batch = next(iter(tiny.seed.batches(data)))
    tiny.seed.hidden(model.backbone, batch)  # with gradients, as in training
    expected = embed(model, data)
    if copied == "loaded":
        again = load_model(model.save(tmp_path / "model"))
    elif copied == "pickled":
        torch.save(model.backbone, tmp_path / "backbone")
        again = evidence(merge_with)
        again.backbone = torch.load(tmp_path / "backbone", weights_only=False)
    else:
        again = copy.deepcopy(model)
    assert chained(model) and chained(again)
    assert torch.equal(embed(again, data), expected)
    for one, two in zip(again.layers, model.layers):
        assert one.router is not two.router and torch.equal(one.router.center, two.router.center)
        assert torch.equal(one.router.scale, two.router.scale) and two.router.scale.std() > 0
    with torch.no_grad():
        model.layers[0].router.vectors.neg_()
    assert torch.equal(embed(again, data), expected) and not close(embed(model, data), expected)


@pytest.mark.parametrize("place", [0, 1])
def test_a_pass_that_breaks_off_does_not_spoil_the_next_one(place, merge_with, tiny):
    model, data = evidence(merge_with), tiny.a.test
    expected = embed(model, data)

    def stop(ffn, inputs):
        raise KeyboardInterrupt

    for other, samples in ((8, 12), (8, 8), (3, 12)):  # fewer, as many, and fewer again
        handle = model.layers[place].ffn.c_proj.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            embed(model, tiny.b.test.select(range(other)))
        handle.remove()
        assert close(embed(model, data.select(range(samples))), expected[:samples])
    assert torch.equal(embed(model, data), expected)
    copy.deepcopy(model)


def test_only_goes_with_evidence_and_is_undone(merge_with, tiny):
    model, data = evidence(merge_with), tiny.a.test
    before = embed(model, data)
    for bundle in tiny.evidence:
        with model.only(bundle.client):
            assert close(embed(model, data), embed(bundle.expert(tiny.seed), data))
    with model.only("seed"):
        assert close(embed(model, data), tiny.seed.embed(data))
    with model.only("a", "c"):
        found = probabilities(model, data)
        load = observe_routing(model, data).load
    assert not load[:, [0, 2]].any() and found[..., [0, 2]].any()
    assert torch.equal(embed(model, data), before)


def test_routing_that_is_watched_is_that_of_the_pass(merge_with, tiny):
    model, data = evidence(merge_with, norm_topk_prob=True), tiny.pool.test
    pi, before = probabilities(model, data).double(), embed(model, data)
    seen = observe_routing(model, data, batch_size=5)
    entropy = torch.special.entr(pi).sum(-1).mean(1) / torch.tensor(4.0).log()
    assert seen.entropy == pytest.approx(entropy.numpy(), abs=1e-4)
    best = pi.where(pi >= pi.topk(2, dim=-1).values[..., -1:], 0.0)
    load = (best / best.sum(-1, keepdim=True)).mean(1)
    assert seen.load == pytest.approx(load.numpy(), abs=1e-4)
    assert torch.equal(embed(model, data), before)


def test_fine_tuning_moves_every_routing_vector_of_evidence_and_no_unit(merge_with, tune, tiny):
    model = evidence(merge_with, norm_topk_prob=True)
    before = weights(model.backbone)
    units = [(one.router.center.clone(), one.router.scale.clone()) for one in model.layers]
    changes = moved(tune(model).backbone, before)
    for path, layer, (center, scale) in zip(tiny.seed.layers, model.layers, units):
        assert torch.equal(layer.router.center, center) and torch.equal(layer.router.scale, scale)
        assert f"{path}.router.vectors" in changes and layer.router.lam.item() == 1
    assert torch.equal(embed(model, tiny.a.test), embed(model, tiny.a.test))


@pytest.mark.parametrize("form", ["mean", "moments", "activation", "evidence"])
def test_an_expert_that_is_held_keeps_its_line_of_every_router(form, merge_with, tune):
    model = merge_with(form=form, top_k=4, norm_topk_prob=True, seed_logit=-1.0)
    lines = lambda: [
        torch.cat([p for p in (r.vectors, b) if p is not None], 1).detach().clone()
        for r in (layer.router for layer in model.layers)
        for b in [None if r.biases is None else r.biases[:, None]]
    ]
    before = lines()
    assert model.hold("b") is model
    tune(model)
    for old, new in zip(before, lines()):
        same_line = (old == new).all(1)
        assert same_line.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="no expert 'd'"):
        model.hold("d")


# ---- how many numbers


@pytest.mark.parametrize(
    "settings, routers",
    [
        (dict(), 2 * (3 * 64 + 1)),
        (dict(shared_lam=True), 2 * 3 * 64 + 1),
        (dict(form="logistic"), 2 * (3 * 65 + 1)),
        (dict(form="moments"), 2 * (3 * 129 + 1)),
        (dict(form="evidence"), 2 * (3 * (4 * (64 + 256) + 1) + 1)),
    ],
    ids=str,
)
def test_active_parameters_are_those_of_the_largest_experts_that_a_token_can_choose(
    settings, routers, tiny
):
    backbone = sum(value.numel() for value in tiny.seed.backbone.state_dict().values())
    ffns = [tiny.seed.backbone.get_submodule(path) for path in tiny.seed.layers]
    maps = [getattr(ffn, name) for ffn in ffns for name in tiny.seed.ffn.linears]
    line = sum(linear.in_features + linear.out_features for linear in maps)  # of rank 1
    for top_k, rank in ((1, 4), (2, 6), (3, 6)):
        model = new_model(tiny, top_k=top_k, **settings)
        active = backbone + rank * line + routers
        total = backbone + 6 * line + routers
        assert model.count_parameters() == dict(total=total, active=active)
        assert total == sum(p.numel() for p in model.backbone.parameters())
        assert model.parameter_groups() == dict(seed=backbone, factors=6 * line, routers=routers)


def test_seed_alone_has_a_router_and_nothing_more(tiny):
    alone = UnifiedModel(tiny.seed, ["seed"], [0], [0.0])
    count = sum(value.numel() for value in tiny.seed.backbone.state_dict().values()) + 2 * 65
    assert alone.count_parameters() == dict(total=count, active=count)


# ---- its folder


@every_router
def test_saved_model_comes_back_the_same_and_can_be_trained_on(
    settings, merge_with, tune, tiny, tmp_path
):
    model, data = tune(merge_with(**settings)), tiny.pool.test
    folder = model.save(tmp_path / "model", dict(from_="a test"))
    assert read_manifest(folder, "model")["inputs"] == dict(from_="a test")
    again = load_model(folder)
    assert type(again) is UnifiedModel and again.seed.identity == tiny.seed.identity
    for name in ("experts", "ranks", "scales", "settings"):
        assert getattr(again, name) == getattr(model, name)
    assert same(again.backbone, model.backbone)
    assert torch.equal(embed(again, data), embed(model, data))
    assert again.parameter_groups() == model.parameter_groups()
    assert same(tune(again).backbone, tune(model).backbone)


def test_model_with_a_number_that_is_not_finite_is_not_saved(merge_with, tmp_path):
    model = merge_with()
    with torch.no_grad():
        model.layers[1].router.vectors[0, 0] = torch.nan
    said = "router.vectors of the unified model is not finite"
    with pytest.raises(FloatingPointError, match=said):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_saving_changes_nothing_and_replaces_what_was_there(merge_with, tmp_path):
    model, before = merge_with(), weights(merge_with().backbone)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("of before")
    model.save(tmp_path / "model")
    assert not moved(model.backbone, before) and not (tmp_path / "model" / "old").exists()
    assert load_model(tmp_path / "model").experts == model.experts


def without(tensors):
    del tensors["transformer.resblocks.1.mlp.a.c_fc"]


def of_another_shape(tensors):
    tensors["transformer.resblocks.0.mlp.router.vectors"] = torch.zeros(3, 64)


def with_another(tensors):
    tensors["transformer.resblocks.7.mlp.a.c_fc"] = torch.zeros(1)


def without_units(tensors):
    del tensors["transformer.resblocks.1.mlp.router.scale"]


WRONG = {
    without: "lacks the tensor transformer.resblocks.1.mlp.a.c_fc",
    of_another_shape: r"0.mlp.router.vectors is \[3, 64\], but must be \[4, 64\]",
    without_units: "lacks the tensor transformer.resblocks.1.mlp.router.scale",
    with_another: "a tensor that no layer uses: transformer.resblocks.7",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_tensors_that_do_not_fit_are_refused_and_named(change, merge_with, tmp_path):
    form = "evidence" if change is without_units else "mean"
    file = merge_with(form=form).save(tmp_path / "model") / "moe.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=WRONG[change]):
        read_model(tmp_path / "model")
    with pytest.raises(ValueError, match="was changed after it was written"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    "change",
    [
        dict(experts=["seed", "a", "b", "a"]),
        dict(experts=["seed"]),
        dict(experts=["seed", "a", "b", "../c"]),
        dict(experts=["seed", "a", "b", "/c"]),
        dict(experts=["seed", "a", "b", ""]),
        dict(experts=["seed", "a", "b", "B"]),
        dict(experts=["a", "seed", "b", "c"]),
        dict(experts=["seed", "seed", "b", "c"], ranks=[0, 0, 4, 4]),
        dict(scales=[0, 2, 2, -2]),
        dict(scales=[0, 2, 2, float("nan")]),
        dict(scales=[0, 2, 2, 10**400]),
        dict(experts=[], ranks=[], scales=[]),
        dict(ranks=[0, 4, -4, 4]),
        dict(ranks=[0, 4, 4]),
        dict(ranks="4"),
        dict(size=4),
    ],
    ids=str,
)
def test_facts_that_cannot_be_are_refused_and_the_file_is_named(change, merge_with, tmp_path):
    file = merge_with().save(tmp_path / "model") / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="model.json"):
        read_model(tmp_path / "model")


def test_facts_are_those_of_the_model(merge_with, tmp_path):
    folder = merge_with(top_k=2).save(tmp_path / "model")
    told = json.loads((folder / "model.json").read_text())
    assert told.pop("kind") == "moe"
    told["router"] = RouterSettings(**told["router"])
    wanted = ["seed", "a", "b", "c"], [0, 4, 4, 4], [0.0, 2.0, 2.0, 2.0], RouterSettings(top_k=2)
    assert MoEFacts(**told) == MoEFacts(*wanted)


# ---- its lineage


LINEAGE = [
    Contribution("a", digest("of a"), 12, 30, digest([1, 2])),
    Contribution("c", digest("of c"), 0),
]


def test_lineage_comes_back_from_a_folder_and_is_shown(merge_with, tmp_path):
    model = merge_with()
    assert model.lineage == [] and model.random_state is None
    assert load_model(model.save(tmp_path / "without")).lineage_table().empty
    model.lineage, model.random_state = LINEAGE, 7
    again = load_model(model.save(tmp_path / "model"))
    assert again.lineage == LINEAGE and again.random_state == 7
    table = again.lineage_table()
    assert list(table.index) == ["a", "c"] and table.loc["a", "bundle"] == digest("of a")
    assert list(table["proxies"]) == [12, 0] and table.loc["a", "private_samples"] == 30
    assert same(again.backbone, load_model(tmp_path / "without").backbone)


def test_a_folder_that_was_written_without_a_lineage_can_still_be_read(merge_with, tmp_path):
    file = merge_with().save(tmp_path / "model") / "model.json"
    told = json.loads(file.read_text())
    assert told.pop("lineage") == [] and told.pop("random_state") is None
    file.write_text(json.dumps(told))
    again = read_model(tmp_path / "model")
    assert again.lineage == [] and again.random_state is None


ONE = dict(client="a", bundle=digest("of a"), proxies=12)
LINEAGES = [
    ([ONE | dict(client="d")], "lineage must name experts of the model"),
    ([ONE, ONE], "each once"),
    ([ONE | dict(bundle="../a")], "bundle is '../a', but must be 64 hexadecimal digits"),
    ([ONE | dict(bundle=digest("of a").upper())], "64 hexadecimal digits"),
    ([ONE | dict(proxies_sha256="0" * 65)], "proxies_sha256 is"),
    ([ONE | dict(proxies=-1)], "proxies is -1, but must not be negative"),
    ([ONE | dict(private_samples=-1)], "private_samples is -1"),
    ([ONE | dict(proxies="many")], "lineage.0.proxies is 'many'"),
    ([ONE | dict(path="/etc")], "lineage.0.path is '/etc'. Unexpected"),
    ([dict(client="a")], "lineage.0.bundle"),
    ({"a": ONE}, "lineage is"),
    ("a", "lineage is 'a'"),
    ([[]], "lineage.0 is"),
]


@pytest.mark.parametrize("lineage, told", LINEAGES, ids=[told for _, told in LINEAGES])
def test_lineages_that_cannot_be_are_refused_and_the_file_is_named(
    lineage, told, merge_with, tmp_path
):
    file = merge_with().save(tmp_path / "model") / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(lineage=lineage)))
    with pytest.raises(ValueError, match=f"model.json.*{told}"):
        read_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["../a", "/a", "", ".a", "seed", "Seed", "St. Mary", "x" * 65])
def test_experts_have_names_that_a_client_may_have(name, tiny):
    "Names become folders when experts are taken out; this is said before anything is trained."
    with pytest.raises(ValueError, match="the client's name"):
        UnifiedModel(tiny.seed, ["seed", name], [0, 4], [0.0, 2.0])


# ---- experts that stay in the file


@every_router
def test_a_model_from_its_file_gives_and_writes_the_same_bits(settings, merge_with, tiny, tmp_path):
    model = merge_with(**settings)
    folder = model.save(tmp_path / "model")
    expected = embed(model, tiny.pool.test)
    for working_set in (1, 2, 9):
        stored = load_model(folder, working_set=working_set)
        assert torch.equal(embed(stored, tiny.pool.test), expected)
        tables = [rows for layer in stored.layers for rows in stored_rows(layer).values()]
        assert all(len(rows.kept) <= working_set for rows in tables)
    with stored.only("b"), model.only("b"):
        assert torch.equal(embed(stored, tiny.pool.test), embed(model, tiny.pool.test))
    assert stored.count_parameters() == model.count_parameters()
    again = stored.save(tmp_path / "again")
    files = [one / "moe.safetensors" for one in (folder, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_model_is_written_as_the_library_writes(merge_with, tmp_path):
    model = merge_with(top_k=2)
    file = model.save(tmp_path / "model") / "moe.safetensors"
    save_file(load_file(file), tmp_path / "library")
    assert file.read_bytes() == (tmp_path / "library").read_bytes()


@torch.no_grad()
@pytest.mark.parametrize("working_set", [1, 2])
def test_attention_from_the_file_gives_the_same_bits(working_set, tmp_path):
    seed = untrained_decoder([text_dataset(QUESTIONS, "questions")], num_hidden_layers=3)
    names, attention = ["seed", "a", "b", "c"], ["q_proj", "v_proj"]
    scales = [0.0, 1.0, 2.0, 0.5]
    model = UnifiedModel(seed, names, [0, 4, 2, 8], scales, RouterSettings(top_k=2), attention)
    for part in (*model.layers, *model.maps.values()):
        for name, p in part.named_parameters():
            if name.split(".")[0] in ("a", "b", "router") and p.ndim:
                p.normal_(std=0.3)
    stored = load_model(model.save(tmp_path / "model"), working_set=working_set)
    tokens = torch.randint(3, 50, (3, 20), generator=torch.Generator().manual_seed(0))
    found, expected = (m.backbone(tokens).logits for m in (stored, model))
    assert torch.equal(found, expected)
    kept = [len(rows.kept) for part in stored.maps.values() for rows in stored_rows(part).values()]
    assert max(kept[4:]) <= working_set


def test_a_model_from_its_file_refuses_to_learn(merge_with, tune, tmp_path):
    stored = load_model(merge_with().save(tmp_path / "model"), working_set=1)
    with pytest.raises(ValueError, match="cannot learn: load the model without"):
        tune(stored)
    assert not any(p.requires_grad for p in stored.backbone.parameters())


def test_a_working_set_needs_experts(merge_with, tiny, tmp_path):
    folder = merge_with().save(tmp_path / "model")
    with pytest.raises(ValueError, match="working_set is 0, but a layer needs 1"):
        load_model(folder, working_set=0)
    dense = Model(tiny.seed, tiny.seed.backbone).save(tmp_path / "dense")
    with pytest.raises(ValueError, match="model.json: a model of the kind 'dense' has no experts"):
        load_model(dense, working_set=1)


def test_a_file_that_was_replaced_meanwhile_is_noticed(merge_with, tiny, tmp_path):
    stored = load_model(merge_with().save(tmp_path / "model"), working_set=1)
    embed(stored, tiny.pool.test)
    merge_with(random_state=1, form="random").save(tmp_path / "model")
    with pytest.raises(ValueError, match="moe.safetensors was replaced since it was opened"):
        embed(stored, tiny.pool.test)


def test_numbers_that_are_not_finite_are_not_written_from_where_they_are_stored(
    merge_with, tmp_path
):
    model = merge_with()
    stored = load_model(model.save(tmp_path / "model"), working_set=1)
    table = stored.layers[1].a.tables["c_fc"]
    table.fetch = lambda expert: torch.full((4, 64), torch.inf)
    with pytest.raises(
        FloatingPointError, match=r"1.mlp.a.c_fc of the unified model is not finite"
    ):
        stored.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()
