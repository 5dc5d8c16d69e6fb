"Routing vectors: what a client says of its domain, and the optimum that it is."

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import concatenate_datasets
from networks import close, normal, spread
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize

import harmomoe.base.tensors as tensors_module
import harmomoe.describe.routing as routing_module
from harmomoe.base.process import seeded
from harmomoe.data.texts import text_dataset
from harmomoe.describe.routing import (
    FILE,
    SHORTEST,
    RoutingVectors,
    beginnings,
    client_routing,
    evidence_routing,
    form_means,
    layer_means,
    load_routing,
    log_ratios,
    logistic_routing,
    mean_routing,
    public_units,
    save_routing,
    seed_routing,
)
from harmomoe.models.weights import open_seed
from harmomoe.moe.context import FORMS, running_mean, vector_size

RATIOS = [form for form in FORMS if form != "mean"]  # the forms that come from a regression
each_ratio = pytest.mark.parametrize("form", RATIOS)
WIDTHS = {form: vector_size(form, 64, 256) for form in FORMS}  # of the tiny seed
PENALTY = 0.005


def same(one, two):
    equal = torch.equal(one.vectors, two.vectors) and torch.equal(one.biases, two.biases)
    return equal and one.form == two.form


def logits(routing, z):
    "What the routing vectors say of tokens [layers, n, d], in float64."
    scores = torch.einsum("lnd,ld->ln", z.double(), routing.vectors.double())
    return scores + routing.biases.double()[:, None]


# ---- beginnings of contexts


def test_beginnings_are_as_often_short_as_long_and_never_shorter_than_they_must_be():
    mask = torch.ones(2000, 256, dtype=torch.bool)
    found = beginnings(mask)
    lengths = (found[:, 0] > 0).sum(1)
    counted = torch.arange(256) < lengths[:, None]  # the first tokens, no others, all alike
    assert torch.equal(found[:, 0], (counted / lengths[:, None].double()).float())
    assert lengths.min() == SHORTEST and lengths.max() > 250
    for length in (8, 16, 32, 64, 128):  # evenly on a logarithmic scale
        below = (lengths < length).float().mean().item()
        assert below == pytest.approx(np.log(length / 4) / np.log(64), abs=0.03)
    assert torch.equal(found, beginnings(mask))
    parts = [beginnings(mask[:700]), beginnings(mask[700:], rows=torch.arange(700, 2000))]
    assert torch.equal(found, torch.cat(parts))  # batches change nothing


def test_a_context_has_as_many_beginnings_as_asked_for():
    mask = torch.ones(60, 256, dtype=torch.bool)
    found = beginnings(mask, 5)
    assert found.shape == (60, 5, 256)
    assert torch.equal(found.flatten(0, 1), beginnings(torch.ones(300, 256).bool())[:, 0])
    parts = [beginnings(mask[:7], 5), beginnings(mask[7:], 5, rows=torch.arange(7, 60))]
    assert torch.equal(found, torch.cat(parts))


def test_beginnings_are_those_of_real_tokens_wherever_they_stand():
    lengths = torch.tensor([0, 1, 3, 4, 9, 40])
    right = torch.arange(40) < lengths[:, None]
    found, left = (beginnings(mask)[:, 0] > 0 for mask in (right, right.flip(1)))
    assert torch.equal(found.sum(1), left.sum(1)) and not (found & ~right).any()
    assert found.sum(1)[:4].tolist() == [0, 1, 3, 4]
    for row, kept in zip(right.flip(1), left):
        assert torch.equal(kept[row], torch.arange(int(row.sum())) < kept.sum())


def test_a_beginning_is_what_a_router_sees_at_its_last_token():
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(30).expand(4, 30) >= torch.tensor([[0], [5], [11], [26]])
    values = torch.randn(4, 30, 3, generator=generator)
    for horizon in (0.0, 6.0):
        seen = running_mean(values.double(), mask, horizon=horizon)
        weights = beginnings(mask, 7, horizon)
        assert torch.allclose(weights.sum(2), torch.ones(4, 7))
        last = 29 - (weights.flip(2) > 0).float().argmax(2)
        expected = seen.gather(1, last[..., None].expand(4, 7, 3))
        assert torch.allclose((weights @ values).double(), expected, atol=1e-6)


def test_ratios_of_growing_contexts_come_from_beginnings_and_all_else_from_the_whole(
    tiny_seed, tiny_benchmark, monkeypatch
):
    images, real = tiny_benchmark.clients[0].train.select(range(6)), torch.ones(1, 5).bool()
    mask = lambda batch, reach: real.expand(len(batch["images"]), 5)
    monkeypatch.setattr(tiny_seed, "token_mask", mask)
    args = tiny_seed, tiny_seed.backbone, images
    kept = beginnings(real.expand(6, 5))[:, 0] > 0
    assert kept.sum() < 30
    cut = lambda batch, reach: kept[: len(batch["images"])]
    for form in ("mean", "logistic", "activation"):
        whole = form_means(form, *args)
        assert torch.equal(form_means(form, *args, "prompt"), whole)
        assert torch.equal(form_means(form, *args, "prefix"), whole) == (form == "mean")
    found = form_means("logistic", *args, "prefix")
    several = form_means("activation", *args, "prefix", 3, 2.0)
    assert several.shape[1] == 3 * len(images)
    with pytest.raises(ValueError, match="whole contexts"):
        form_means("moments", *args, "prefix")
    monkeypatch.setattr(tiny_seed, "token_mask", cut)
    assert torch.allclose(found, layer_means(*args), atol=1e-6)


def test_progress_is_shown_where_it_has_a_name(tiny_seed, images, capsys):
    args = "logistic", tiny_seed, tiny_seed.backbone, images
    quiet = form_means(*args)
    assert not capsys.readouterr().err
    assert torch.equal(form_means(*args, progress="public samples"), quiet)
    assert "public samples: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("private, number", [(3, 4), (8, 4), (20, 2), (60, 1)])
def test_private_texts_have_no_more_beginnings_than_the_public_sample(
    private, number, tiny_seed, tiny_benchmark, monkeypatch
):
    real, asked = torch.ones(1, 5).bool(), {}
    mask = lambda batch, reach: real.expand(len(batch["images"]), 5)
    monkeypatch.setattr(tiny_seed, "token_mask", mask)
    made = routing_module.form_means

    def noted(form, seed, backbone, data, reach, number, horizon):
        asked[len(data)] = number
        return made(form, seed, backbone, data, reach, number, horizon)

    monkeypatch.setattr(routing_module, "form_means", noted)
    public = tiny_benchmark.pool.train.select(range(10))
    own = concatenate_datasets([tiny_benchmark.clients[0].train] * 9).select(range(private))
    given = "logistic", tiny_seed, tiny_seed.backbone, own, None, public
    found = client_routing(*given, reach="prefix", number=4, horizon=2.0)
    assert asked == {10: 4, private: number} and found.vectors.isfinite().all()


@pytest.mark.parametrize("number", [1, 2, 16])
def test_texts_are_run_as_far_as_their_longest_beginnings(number, tiny_decoder, monkeypatch):
    "Which changes nothing, since no token of these sees more."
    seed, rng = open_seed(str(tiny_decoder)), np.random.default_rng(0)
    words = [" ".join(rng.choice(["milk", "bread", "honey"], n)) for n in rng.integers(3, 12, 50)]
    data = text_dataset([dict(text=text) for text in words], "texts")
    run, hidden = [], seed.hidden

    def counted(backbone, batch):
        run.append(batch["attention_mask"].sum().item())
        return hidden(backbone, batch)

    monkeypatch.setattr(seed, "hidden", counted)
    how = dict(reach="prefix", number=number, horizon=4.0, hidden=True, batch_size=7)
    found = layer_means(seed, seed.backbone, data, **how)
    short = sum(run)
    run.clear()
    monkeypatch.setattr(seed, "shortened", lambda batch, tokens: batch)
    assert close(found, layer_means(seed, seed.backbone, data, **how))
    assert found.shape[1] == 50 * number and short < sum(run)
    assert short < 0.6 * sum(run) or number > 1


# ---- means


@pytest.fixture(scope="module")
def expert(tiny_seed):
    "A backbone with an adapter beside each FFN, as while an expert is trained."
    lora = LoraConfig(r=4, target_modules=list(tiny_seed.ffn.linears))
    with torch.no_grad(), seeded(1):
        backbone = get_peft_model(tiny_seed.new_backbone(), lora).eval()
        for name, p in backbone.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.3)
    return backbone


@pytest.fixture(scope="module")
def merged(expert):
    "The same as an ordinary network."
    return copy.deepcopy(expert).merge_and_unload()


@pytest.fixture(params=["seed", "expert", "merged"])
def backbone(request, tiny_seed):
    if request.param == "seed":
        return tiny_seed.backbone
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def images(tiny_benchmark):
    "Thirty samples of a client."
    return tiny_benchmark.clients[0].train


@torch.no_grad()
def entering(seed, backbone, data):
    "What enters each FFN, sample by sample: float64 [layers, n, T, d]."
    seen = {layer: [] for layer in seed.layers}

    def note(layer):
        return lambda module, inputs: seen[layer].append(inputs[0].double())

    handles = [
        module.register_forward_pre_hook(note(layer))
        for layer in seed.layers
        for name, module in backbone.named_modules()
        if name.endswith(layer)
    ]
    for batch in seed.batches(data, batch_size=1):
        seed.hidden(backbone, batch)
    for handle in handles:
        handle.remove()
    return torch.stack([torch.cat(tokens) for tokens in seen.values()])


def test_layer_means_are_those_of_what_enters_each_ffn_whatever_the_batch(
    backbone, tiny_seed, images
):
    z = entering(tiny_seed, backbone, images)
    for batch_size in (256, 7):
        means = layer_means(tiny_seed, backbone, images, batch_size)
        assert means.dtype == torch.float32 and means.shape == (2, 30, 64)
        assert close(means.double(), z.mean(2))
        both = layer_means(tiny_seed, backbone, images, batch_size, spread=True)
        assert both.dtype == torch.float32 and both.shape == (2, 30, 128)
        assert torch.equal(both[..., :64], means)
        assert np.allclose(both[..., 64:], spread(z, 2), atol=1e-5)


def test_layer_means_are_the_same_in_memory_and_in_a_file(tiny_seed, images, monkeypatch):
    in_memory = layer_means(tiny_seed, tiny_seed.backbone, images, 7, spread=True)
    monkeypatch.setattr(tensors_module, "IN_MEMORY", 0)
    in_file = layer_means(tiny_seed, tiny_seed.backbone, images, 7, spread=True)
    assert torch.equal(in_memory, in_file)
    ratio = logistic_routing(in_file[:, :20], in_file[:, 20:])
    assert torch.equal(
        ratio.vectors, logistic_routing(in_memory[:, :20], in_memory[:, 20:]).vectors
    )


def test_backbones_have_means_of_their_own(expert, merged, tiny_seed, images):
    of_seed, of_expert, of_merged = (
        layer_means(tiny_seed, backbone, images)
        for backbone in (tiny_seed.backbone, expert, merged)
    )
    assert close(of_expert, of_merged) and torch.equal(of_expert[0], of_seed[0])
    assert (of_expert[1] - of_seed[1]).abs().max() > 0.1  # after the first changed FFN


@torch.no_grad()
@pytest.mark.parametrize("reals", [None, [True, False, True, True, False]], ids=["all", "some"])
def test_hidden_activations_are_those_of_the_seeds_own_ffn_wherever_the_tokens_come_from(
    backbone, reals, tiny_seed, images, monkeypatch
):
    data, real = images.select(range(12)), torch.tensor([True] * 5 if reals is None else reals)
    if reals:
        mask = lambda batch, reach: real.expand(len(batch["images"]), 5)
        monkeypatch.setattr(tiny_seed, "token_mask", mask)
    z = entering(tiny_seed, backbone, data)[:, :, real]
    ffns = [tiny_seed.backbone.get_submodule(path) for path in tiny_seed.layers]
    maps = [(ffn.c_fc.weight.double(), ffn.c_fc.bias.double()) for ffn in ffns]
    hidden = torch.stack([F.gelu(F.linear(one, *linear)) for one, linear in zip(z, maps)])
    for batch_size in (256, 5):
        found = layer_means(tiny_seed, backbone, data, batch_size, hidden=True)
        wanted = torch.cat([z.mean(2), hidden.mean(2)], -1)
        assert found.dtype == torch.float32 and close(found.double(), wanted)
        found = layer_means(tiny_seed, backbone, data, batch_size, spread=True, hidden=True)
        parts = [z.mean(2), spread(z, 2), hidden.mean(2), spread(hidden, 2)]
        assert np.allclose(found, np.concatenate(parts, -1), atol=1e-4)
        assert found.shape == (2, 12, 2 * (64 + 256))


def test_layer_means_leave_padding_out(tiny_seed, images, monkeypatch):
    real, data = torch.tensor([True, False, True, True, False]), images.select(range(12))
    mask = lambda batch, reach: real.expand(len(batch["images"]), 5)
    monkeypatch.setattr(tiny_seed, "token_mask", mask)
    z = entering(tiny_seed, tiny_seed.backbone, data)[:, :, real]
    found = layer_means(tiny_seed, tiny_seed.backbone, data, 5, spread=True)
    assert torch.equal(layer_means(tiny_seed, tiny_seed.backbone, data, 5), found[..., :64])
    assert close(found[..., :64].double(), z.mean(2))
    assert np.allclose(found[..., 64:], spread(z, 2), atol=1e-5)


def test_answers_are_not_run_where_prompts_count(tiny_decoder):
    seed = open_seed(str(tiny_decoder))
    rows = [dict(instruction=f"What is {i}?", output="It is " + "long " * 40) for i in range(6)]
    data, entered = text_dataset(rows, "questions"), []
    backbone = seed.new_backbone()
    first = backbone.get_submodule(seed.layers[0])
    first.register_forward_pre_hook(lambda module, given: entered.append(given[0]))
    found = layer_means(seed, backbone, data, reach="prompt")
    prompts = [torch.tensor([seed.encode(prompt, "")[0]]) for prompt in data["prompt"]]
    # the token that ends a text is the one answer that is left
    assert entered[0].shape[:2] == (6, 1 + max(ids.shape[1] for ids in prompts))
    entered.clear()
    with torch.no_grad():
        for ids in prompts:
            backbone(input_ids=ids)
    expected = torch.stack([z[0].mean(0) for z in entered])
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_layer_means_ask_for_the_tokens_that_the_router_will_see(tiny_seed, images, monkeypatch):
    asked = []
    monkeypatch.setattr(tiny_seed, "token_mask", lambda batch, reach: asked.append(reach))
    for reach in ("sequence", "prompt"):
        layer_means(tiny_seed, tiny_seed.backbone, images.select(range(2)), reach=reach)
    assert asked == ["sequence", "prompt"]


def test_layer_means_leave_no_hook_behind_even_after_an_error(tiny_seed, images, monkeypatch):
    backbone = tiny_seed.backbone
    hooks = [backbone.get_submodule(path)._forward_pre_hooks for path in tiny_seed.layers]
    layer_means(tiny_seed, backbone, images)
    assert not any(hooks)
    monkeypatch.setattr(tiny_seed, "hidden", lambda backbone, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer_means(tiny_seed, backbone, images)
    assert not any(hooks)


def test_mean_routing_is_exact_where_float32_sums_are_not():
    means = 1000 + normal(3, 5000, 4)
    exact = means.numpy().astype(np.float64).mean(1).astype(np.float32)
    found = mean_routing(means)
    assert np.array_equal(found.vectors.numpy(), exact)
    assert not np.array_equal(means.numpy().mean(1), exact)
    assert found.form == "mean" and torch.equal(found.biases, torch.zeros(3))


# ---- density ratios


@pytest.fixture
def samples():
    "Means of 25 private and 60 public samples in 2 layers of width 6: [2, 25, 6] and [2, 60, 6]."
    move, turn = torch.tensor([1.0, -0.5, 0, 0, 0.3, 0]), torch.eye(6) + 0.3
    private = normal(2, 25, 6, random_state=1) * 1.5 + move
    return private, normal(2, 60, 6, random_state=2) @ turn - 2


def objective(private, public, penalty=PENALTY):
    """A function (weights and intercept, float64 [d + 1]) -> loss and gradient of one layer, on
    standardised features."""
    x = torch.cat([private, public]).double()
    x, n = (x - x.mean(0)) / x.std(0, correction=0), len(private)

    def loss(values):
        w = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        z = x @ w[:-1] + w[-1]
        misfit = (F.softplus(-z[:n]).mean() + F.softplus(z[n:]).mean()) / 2
        value = misfit + penalty / 2 * w[:-1].square().sum()
        return value.item(), torch.autograd.grad(value, w)[0].numpy()

    return loss


def standardised(routing, layer, private, public):
    "A layer's vector and bias as coefficients of standardised features: float64 [d + 1]."
    x, vector = torch.cat([private, public]).double(), routing.vectors[layer].double()
    bias = routing.biases[layer].double() + vector @ x.mean(0)
    return torch.cat([vector * x.std(0, correction=0), bias[None]]).numpy()


def of_form(form, samples):
    "The samples, for the form 'moments' with as many positive numbers beside them."
    if form == "logistic":
        return samples
    positive = lambda part, i: (0.2 * normal(*part.shape, random_state=3 + i) - 1).exp()
    return [torch.cat([part, positive(part, i)], -1) for i, part in enumerate(samples)]


@pytest.mark.parametrize("form", ["logistic", "moments"])
@pytest.mark.parametrize("penalty", [PENALTY, 0.5])
def test_logistic_routing_is_the_optimum_in_each_layer(penalty, form, samples):
    samples, width = of_form(form, samples), 6 * FORMS[form][0]
    found = logistic_routing(*samples, penalty, form)
    assert found.form == form and found.vectors.shape == (2, width) and found.biases.shape == (2,)
    for layer, (private, public) in enumerate(zip(*samples)):
        loss, w = objective(private, public, penalty), standardised(found, layer, private, public)
        search = dict(jac=True, method="BFGS", options=dict(gtol=1e-10))
        best = minimize(loss, np.zeros(width + 1), **search)
        assert abs(loss(w)[1]).max() < 1e-4
        assert w == pytest.approx(best.x, abs=1e-3)  # where the solver stops
        alone = logistic_routing(private[None], public[None], penalty, form)
        assert torch.equal(alone.vectors[0], found.vectors[layer])
        assert alone.biases[0] == found.biases[layer]


def test_penalty_is_a_two_hundredth_and_the_form_logistic_unless_told(samples):
    assert logistic_routing(*samples).form == "logistic"
    assert same(logistic_routing(*samples), logistic_routing(*samples, PENALTY))
    assert not same(logistic_routing(*samples), logistic_routing(*samples, 2 * PENALTY))


def test_logistic_routing_repeats_bit_by_bit(samples):
    first = logistic_routing(*samples)
    torch.manual_seed(5)
    np.random.seed(5)
    assert same(logistic_routing(*samples), first)


def test_order_of_samples_does_not_matter(samples):
    private, public = samples
    shuffled = private[:, torch.randperm(25, generator=torch.Generator().manual_seed(0))]
    turned, straight = logistic_routing(shuffled, public.flip(1)), logistic_routing(*samples)
    assert torch.allclose(logits(turned, public), logits(straight, public), atol=1e-4)


def test_scale_and_offset_of_features_do_not_matter(samples):
    scale = torch.tensor([10.0, 0.1, 3, 1, 50, 0.5])
    offset = torch.tensor([0.0, 5, -1, 100, 2, 0.3])
    moved = [part * scale + offset for part in samples]
    expected = logits(logistic_routing(*samples), samples[1])
    assert torch.allclose(logits(logistic_routing(*moved), moved[1]), expected, atol=1e-3)


def test_private_and_public_exchanged_turn_the_sign(samples):
    there, back = logistic_routing(*samples), logistic_routing(*reversed(samples))
    assert torch.allclose(back.vectors, -there.vectors, atol=1e-4)
    assert torch.allclose(back.biases, -there.biases, atol=1e-4) and there.biases.abs().min() > 0.1


def test_both_classes_count_the_same_however_many_samples_they_have(samples):
    private, public = samples
    z, found = torch.cat(samples, 1), logistic_routing(*samples)
    assert logits(logistic_routing(z, z.repeat(1, 3, 1)), z).abs().max() < 1e-4
    assert logits(found, private).mean() > 0 > logits(found, public).mean()


def test_a_feature_that_never_changes_plays_no_part(samples):
    widened = [torch.cat([part, torch.full_like(part[..., :1], 7.3)], -1) for part in samples]
    found, expected = logistic_routing(*widened), logistic_routing(*samples)
    assert torch.isfinite(found.vectors).all()
    assert torch.allclose(logits(found, widened[1]), logits(expected, samples[1]), atol=1e-3)


@pytest.mark.parametrize(
    "positives, negatives",
    [
        ((25, 6), (60, 6)),
        ((2, 25, 6), (60, 6)),
        ((25, 6), (2, 60, 6)),
        ((2, 25, 6), (3, 60, 6)),
        ((2, 25, 6), (2, 60, 5)),
        ((0, 25, 6), (0, 60, 6)),
    ],
    ids=str,
)
def test_means_that_do_not_fit_are_refused(positives, negatives):
    with pytest.raises(ValueError, match="same layers and d, but are") as caught:
        logistic_routing(torch.ones(positives), torch.ones(negatives))
    assert f"{positives} and {negatives}" in str(caught.value)


def test_means_of_an_odd_width_are_none_with_spreads(samples):
    with pytest.raises(ValueError):
        logistic_routing(*(part[..., :5] for part in samples), form="moments")


@pytest.mark.parametrize("wrong", [dict(penalty=0), dict(penalty=-1), dict(form="mean")], ids=str)
def test_neither_another_form_nor_a_penalty_below_zero_is_a_density_ratio(wrong, samples):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}, but must be"):
        logistic_routing(*samples, **wrong)


@pytest.mark.parametrize("n, public", [(0, 60), (25, 0)])
def test_density_ratio_needs_samples_of_both_kinds(n, public):
    with pytest.raises(ValueError):
        logistic_routing(torch.ones(2, n, 6), torch.ones(2, public, 6))


# ---- evidence

SIX = 6  # numbers of a sample in a layer


@pytest.fixture
def units(samples):
    "Of some of the public samples, as they would be in the seed."
    return public_units(samples[1][:, :40])


def looks_of(routing, z, units):
    "What each layer says of samples [layers, n, s], written out in float64."
    e, q = (
        part.double()[:, None] for part in routing.vectors.split(routing.vectors.shape[1] // 2, 1)
    )
    center, scale = (unit.double()[:, None] for unit in units)
    u = ((z.double() - center) / scale).clamp(-3, 3)
    return (u * e + u * u * q).sum(-1) + routing.biases.double()[:, None]


def test_units_are_mean_and_deviation_and_never_zero():
    means = 1000 + normal(3, 500, 4)
    means[..., 2] = 7.0
    center, scale = public_units(means)
    exact = means.numpy().astype(np.float64)
    assert center.dtype == scale.dtype == torch.float32
    assert np.array_equal(center.numpy(), exact.mean(1).astype(np.float32))
    assert np.allclose(scale, exact.std(1) + 1e-6, rtol=1e-6) and scale[:, 2].max() < 2e-6


@pytest.mark.parametrize("penalty", [0.05, 0.5])
def test_evidence_routing_is_the_optimum_in_each_layer(penalty, samples, units):
    """Of the same objective as the logistic form's, on u and its squares as they are, clipped at
    three."""
    found = evidence_routing(*samples, *units, penalty)
    assert found.form == "evidence" and found.biases.shape == (2,)
    assert found.vectors.shape == (2, 2 * SIX)
    for layer, (private, public) in enumerate(zip(*samples)):
        center, scale = (unit[layer].double() for unit in units)
        u = ((torch.cat([private, public]).double() - center) / scale).clamp(-3, 3)
        assert 0.02 < (u.abs() == 3).double().mean() < 0.5  # clipping matters here
        x, n = torch.cat([u, u * u], 1), len(private)

        def loss(values):
            w = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            z = x @ w[:-1] + w[-1]
            misfit = (F.softplus(-z[:n]).mean() + F.softplus(z[n:]).mean()) / 2
            value = misfit + penalty / 2 * w[:-1].square().sum()
            return value.item(), torch.autograd.grad(value, w)[0].numpy()

        search = dict(jac=True, method="BFGS", options=dict(gtol=1e-10))
        best = minimize(loss, np.zeros(2 * SIX + 1), **search)
        w = torch.cat([found.vectors[layer], found.biases[layer, None]]).double().numpy()
        assert abs(loss(w)[1]).max() < 2e-4 and w == pytest.approx(best.x, abs=2e-3)
        one = [part[layer : layer + 1] for part in (*samples, *units)]
        assert same(evidence_routing(*one, penalty), of_layer(found, layer))


def of_layer(routing, layer):
    part = slice(layer, layer + 1)
    return RoutingVectors(routing.vectors[part], routing.biases[part], routing.form)


def test_penalty_of_evidence_is_a_twentieth_unless_told(samples, units):
    found = evidence_routing(*samples, *units)
    assert same(found, evidence_routing(*samples, *units, 0.05))
    assert not same(found, evidence_routing(*samples, *units, 0.1))


def test_evidence_tells_what_lies_between_public_samples_which_means_do_not():
    public = normal(1, 300, SIX, random_state=1)
    public = public + 3 * public.sign()  # on both sides
    private = normal(1, 100, SIX, random_state=2) / 2
    units = public_units(public)
    evidence = evidence_routing(private, public, *units)
    right = lambda routing, *units: [
        (log_ratios(routing, part, *units) > 0).double().mean() for part in (private, public)
    ]
    mine, theirs = right(evidence, units)
    assert mine > 0.95 and theirs < 0.05
    mine, theirs = right(logistic_routing(private, public))
    assert (1 - mine) + theirs > 0.5


def test_what_is_further_away_than_three_deviations_counts_as_three(samples, units):
    found = evidence_routing(*samples, *units)
    center, scale = (unit[:, None] for unit in units)
    at_three, beyond = (center + factor * scale for factor in (3.001, 1e6))
    assert torch.equal(log_ratios(found, beyond, units), log_ratios(found, at_three, units))
    far = samples[0].clone()
    far[:, 0] = 1e30
    assert evidence_routing(far, samples[1], *units).vectors.isfinite().all()


def test_both_classes_of_evidence_count_the_same(samples, units):
    z = torch.cat(samples, 1)
    found = evidence_routing(z, z.repeat(1, 3, 1), *units)
    assert log_ratios(found, z, units).abs().max() < 1e-3
    found = evidence_routing(*samples, *units)
    private, public = (log_ratios(found, part, units) for part in samples)
    assert private.mean() > 0 > public.mean()


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(positives=torch.ones(25, SIX)), "same layers and d, but are"),
        (dict(positives=torch.ones(2, 25, SIX + 2)), "same layers and d, but are"),
        (dict(positives=torch.ones(2, 25, 5), negatives=torch.ones(2, 60, 5)), "same layers and d"),
        (dict(center=torch.ones(2, SIX - 2)), r"units must be \[2, 6\]"),
        (dict(scale=torch.ones(SIX)), r"units must be \[2, 6\].* \(6,\)"),
        (dict(penalty=0), "penalty is 0, but must be positive"),
    ],
    ids=str,
)
def test_evidence_of_what_does_not_fit_is_refused(change, said, samples, units):
    given = dict(zip(("positives", "negatives", "center", "scale"), (*samples, *units))) | change
    with pytest.raises(ValueError, match=said):
        evidence_routing(**given)


def test_log_ratios_of_evidence_are_the_mean_of_all_looks_so_far(samples, units):
    found, z = evidence_routing(*samples, *units), samples[1]
    looks = looks_of(found, z, units)
    ratios = log_ratios(found, z, units)
    assert ratios.dtype == torch.float64 and ratios.shape == (2, 60)
    assert torch.allclose(ratios[0], looks[0], atol=1e-5)
    assert torch.allclose(ratios[1], (looks[0] + looks[1]) / 2, atol=1e-5)
    three = RoutingVectors(
        *(torch.cat([x, x[:1]]) for x in (found.vectors, found.biases)), "evidence"
    )
    again = [torch.cat([part, part[:1]]) for part in units]
    wanted = (2 * looks[0] + looks[1]) / 3
    last = log_ratios(three, torch.cat([z, z[:1]]), again)[2]
    assert torch.allclose(last, wanted, atol=1e-5)


@pytest.mark.parametrize("form", ["logistic", "moments"])
def test_log_ratios_of_other_forms_are_products_in_float64(form, samples):
    samples = of_form(form, samples)
    found = logistic_routing(*samples, form=form)
    ratios = log_ratios(found, samples[1])
    assert ratios.dtype == torch.float64
    assert torch.allclose(ratios, logits(found, samples[1]), atol=1e-12)


# ---- the file


@pytest.mark.parametrize("form", FORMS)
def test_routing_vectors_come_back_as_they_were_saved(form, tmp_path):
    biases = torch.zeros(2) if form == "mean" else normal(2, random_state=1)
    routing = RoutingVectors(normal(64, 2).T, biases, form)  # a view, not contiguous
    save_routing({form: routing}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert load_file(tmp_path / FILE).keys() == {f"{form}.vectors", f"{form}.biases"}
    found = load_routing(tmp_path)
    assert list(found) == [form] and same(found[form], routing)


def test_forms_come_back_in_their_order_whatever_it_was_before(tmp_path):
    mean, ratio = mean_routing(normal(2, 9, 4)), logistic_routing(normal(2, 9, 4), normal(2, 9, 4))
    assert ratio.bytes == mean.bytes == 4 * (2 * 4 + 2)
    content = []
    for given in (dict(logistic=ratio, mean=mean), dict(mean=mean, logistic=ratio)):
        save_routing(given, tmp_path)
        content.append((tmp_path / FILE).read_bytes())
        found = load_routing(tmp_path)
        assert list(found) == ["mean", "logistic"]
        assert same(found["mean"], mean) and same(found["logistic"], ratio)
    assert content[0] == content[1]


@pytest.mark.parametrize("form", [None, "logistic", "random"])
def test_vectors_under_another_form_than_their_own_or_none_are_not_saved(form, tmp_path):
    routing = {} if form is None else {form: mean_routing(normal(2, 9, 4))}
    with pytest.raises(ValueError, match="must be given by their forms, but are"):
        save_routing(routing, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [dict(vectors=torch.full((2, 4), torch.nan)), dict(biases=torch.tensor([0, torch.inf]))],
    ids=["vectors", "biases"],
)
def test_routing_vectors_that_are_not_finite_are_not_saved(wrong, tmp_path):
    parts = dict(vectors=torch.zeros(2, 4), biases=torch.zeros(2)) | wrong
    said = f"logistic.{min(wrong)} of the routing vectors is not finite"
    with pytest.raises(FloatingPointError, match=said):
        save_routing(dict(logistic=RoutingVectors(**parts, form="logistic")), tmp_path)
    assert list(tmp_path.iterdir()) == []


FINITE, SHAPES = "must hold finite numbers", r"must be \[layers, d\] and \[layers\], but are "
BOTH, FORM = (
    "must hold 'FORM.vectors' and 'FORM.biases' .*",
    "must be one of mean, logistic, moments, activation, evidence",
)
# what is wrong -> the tensors that differ, the form, and what is said
REFUSED = {
    "no vectors": (dict(vectors=None), "mean", f"{BOTH}, but holds mean.biases."),
    "no biases": (dict(biases=None), "mean", f"{BOTH}, but holds mean.vectors."),
    "nothing": (dict(biases=None, vectors=None), "mean", f"{BOTH}, but holds nothing."),
    "more": (
        dict(more=torch.zeros(2)),
        "mean",
        f"{BOTH}, but holds mean.biases, mean.more, mean.v",
    ),
    "NaN": (dict(vectors=torch.full((2, 4), torch.nan)), "mean", f"{FINITE}, but its mean.vectors"),
    "infinity": (
        dict(biases=torch.tensor([0, torch.inf])),
        "logistic",
        f"{FINITE}, but its logistic.biases",
    ),
    "integers": (dict(vectors=torch.ones(2, 4).long()), "mean", f"{FINITE}, but its mean.vectors"),
    "one dimension": (dict(vectors=torch.zeros(2)), "mean", SHAPES + r"\(2,\) and \(2,\)"),
    "three": (dict(vectors=torch.zeros(2, 4, 1)), "mean", SHAPES + r"\(2, 4, 1\) and \(2,\)"),
    "few biases": (dict(biases=torch.zeros(1)), "logistic", SHAPES + r"\(2, 4\) and \(1,\)"),
    "many": (dict(biases=torch.zeros(2, 4)), "logistic", SHAPES + r"\(2, 4\) and \(2, 4\)"),
    "odd width": (dict(vectors=torch.zeros(2, 5)), "moments", r"but are \(2, 5\) and \(2,\)"),
    "no squares": (
        dict(vectors=torch.zeros(2, 6)),
        "evidence",
        r"must be \[layers, 4 \(d \+ m\)\] and \[layers\], but are \(2, 6\) and \(2,\)",
    ),
    "unknown form": (dict(), "random", f"{BOTH}, but holds random.biases, random.vectors"),
    "biases of a mean": (dict(biases=torch.ones(2)), "mean", "have no biases"),
    "no form": (dict(), "", f"{BOTH}, but holds .biases, .vectors"),
    "beyond float32": (
        dict(vectors=torch.full((2, 4), 1e300, dtype=torch.float64)),
        "mean",
        f"{FINITE}, but its mean.vectors",
    ),
    "a type of four bits": (
        dict(vectors=torch.ones(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
        "mean",
        f"{FINITE}, but its mean.vectors",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_file_of_other_routing_vectors_is_refused_saying_where_and_why(what, tmp_path):
    changes, form, said = REFUSED[what]
    tensors = dict(vectors=torch.zeros(2, 4), biases=torch.zeros(2)) | changes
    tensors = {f"{form}.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=said) as caught:
        load_routing(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)


def test_vectors_with_spreads_have_an_even_width_and_other_vectors_any():
    for form, width in (("moments", 6), ("logistic", 5), ("mean", 5), ("evidence", 8)):
        RoutingVectors(torch.zeros(2, width), torch.zeros(2), form)
    for form, width in (("moments", 5), ("evidence", 6)):
        with pytest.raises(ValueError, match=rf"\(2, {width}\)"):
            RoutingVectors(torch.zeros(2, width), torch.zeros(2), form)


# ---- what a client and the server compute


@pytest.mark.parametrize("proxies", [True, False])
def test_client_sends_the_mean_of_all_that_it_trained_on(
    proxies, merged, tiny_seed, tiny_benchmark, images
):
    pool = tiny_benchmark.pool.train
    chosen = pool.select(range(60, 70)) if proxies else None
    parts = [part for part in (images, chosen) if part is not None]
    means = torch.cat([layer_means(tiny_seed, merged, part) for part in parts], 1)
    found = client_routing("mean", tiny_seed, merged, images, chosen, pool)
    assert found.form == "mean" and not found.biases.any()
    assert close(found.vectors, means.mean(1)) and means.shape[1] == len(images) + 10 * proxies


@pytest.mark.parametrize("form", ["logistic", "evidence"])
def test_public_means_may_come_in_parts(form):
    own, public = normal(3, 20, 4, random_state=0), normal(3, 30, 4, random_state=1)
    parts = public[:, :10], public[:, 10:]
    if form == "logistic":
        fit = logistic_routing
    else:
        fit = lambda own, public: evidence_routing(own, public, *torch.ones(2, 3, 4))
    assert same(fit(own, parts), fit(own, public))
    with pytest.raises(ValueError, match=r"\(3, 20, 4\) and \(3, 10, 4\) and \(2, 20, 4\)"):
        fit(own, (parts[0], parts[1][:2]))


@each_ratio
@pytest.mark.parametrize("at_hand", [True, False])
def test_or_it_sends_its_private_data_against_the_pool(
    at_hand, form, merged, tiny_seed, tiny_benchmark, images
):
    """The pool's samples as they look in both backbones; proxies are public, so they are no
    positives."""
    public = tiny_benchmark.pool.train.select(range(50))
    proxies = tiny_benchmark.pool.train.select(range(60, 70))
    how = dict(spread=form in ("moments", "evidence"), hidden=form in ("activation", "evidence"))
    backbones = merged, tiny_seed.backbone
    others = [layer_means(tiny_seed, backbone, public, **how) for backbone in backbones]
    pair = layer_means(tiny_seed, merged, images, **how), torch.cat(others, 1)
    if form == "evidence":
        expected = evidence_routing(*pair, *public_units(others[1]))
    else:
        expected = logistic_routing(*pair, form=form)
    assert expected.form == form and expected.vectors.shape == (2, WIDTHS[form])
    in_seed = others[1] if at_hand else None
    given = images, proxies, public, in_seed
    assert same(client_routing(form, tiny_seed, merged, *given), expected)


def test_seeds_own_vectors_are_the_pools_mean_or_zero(tiny_seed, tiny_benchmark):
    means = form_means("mean", tiny_seed, tiny_seed.backbone, tiny_benchmark.pool.train)
    found = seed_routing("mean", tiny_seed, means)
    assert found.form == "mean" and close(found.vectors, means.mean(1))
    assert not found.biases.any()
    for form, width in (("logistic", 64), ("moments", 128), ("evidence", 4 * (64 + 256))):
        zero = RoutingVectors(torch.zeros(2, width), torch.zeros(2), form)
        assert same(seed_routing(form, tiny_seed), zero)


@pytest.mark.parametrize("compute", [seed_routing, client_routing, form_means])
def test_unknown_form_is_refused_before_any_work(compute):
    seed = SimpleNamespace(backbone=None)  # which can neither see nor route anything
    given = dict(client_routing=2, form_means=2).get(compute.__name__, 0)
    with pytest.raises(ValueError, match=f"is 'random', but {FORM}"):
        compute("random", seed, *[None] * given)
