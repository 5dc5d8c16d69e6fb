"Experts by sequence, against dense networks, dense gradients and sums written out."

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file, save_file

from harmomoe.models.by_sequence import (
    SEED,
    BySequence,
    SequenceFacts,
    log_perplexity,
)
from harmomoe.models.decoder import DecoderSeed, untrained_decoder
from harmomoe.models.model import load_model, read_model, write_model

PROMPTS = ["One evening in May ", "Two birds ", "It rains, and nobody "]
NAMES, RANKS, SCALES = ["seed", "a", "b", "c"], [0, 2, 3, 1], [0.0, 2.0, 1.0, 0.5]


def rows(choices=()):
    "Three texts, or questions."
    answers = [" A"] * 3 if choices else ["she left.", "sat there.", "minds."]
    return Dataset.from_dict(
        dict(prompt=PROMPTS, answer=answers, choices=[list(choices)] * 3, label=[0, 0, 0])
    )


@pytest.fixture(scope="module")
def seed():
    return untrained_decoder([rows()], initializer_range=0.3)


@pytest.fixture(scope="module")
def make(seed):
    "A function (settings) -> a model with random factors, the same each time."

    def build(by="perplexity", separate=True, top_k=2, attention=None, of=seed):
        attention = [*of.attention_maps] if attention is None else attention
        facts = SequenceFacts(NAMES, RANKS, SCALES, by, top_k, separate, attention)
        model, generator = BySequence(of, facts), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for part in model.maps.values():
                part.a.normal_(0, 0.3, generator=generator)
                part.b.normal_(0, 0.3, generator=generator)
        for part in model.maps.values():
            if part.merged is not None:
                part.merged.copy_(torch.randn(part.merged.shape, generator=generator) * 0.1)
        return model

    return build


def change(model, place, expert):
    "A dense update."
    part = model.maps[place]
    own = slice(part.starts[expert], part.starts[expert + 1])
    return SCALES[expert] * part.b[own].T @ part.a[own]


@torch.no_grad()
def dense(seed, model, expert):
    "The network of one expert, with its own attention."
    backbone = seed.new_backbone()
    for path, name in model.maps:
        weight = getattr(backbone.get_submodule(path), name).weight
        weight += change(model, (path, name), expert)
    return backbone


@pytest.fixture(scope="module")
def batch(seed):
    return next(iter(seed.batches(rows())))


@torch.no_grad()
def answers(model, batch):
    return model.scorer([])(batch)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("expert", range(4))
def test_an_expert_alone_is_the_dense_one_even_where_attention_is_merged(
    expert, separate, make, seed, batch
):
    model, task = make(separate=separate), seed.task([])
    with model.mixed(alone=expert) as backbone, torch.no_grad():
        found = task.scores(backbone, batch)
        assert torch.allclose(found, task.scores(dense(seed, model, expert), batch), atol=1e-4)
    with model.mixed(alone=SEED) as backbone, torch.no_grad():
        assert torch.allclose(
            task.scores(backbone, batch), task.scores(seed.backbone, batch), atol=1e-5
        )


@torch.no_grad()
def by_hand(seed, model, weights, ids, separate):
    "A mixture of one sequence, layer by layer, with the modules of dense experts."
    experts = [dense(seed, model, expert).model for expert in range(4)]
    shared = seed.new_backbone().model
    if not separate:
        for (path, name), part in model.maps.items():
            if part.merged is not None:
                getattr(shared.get_submodule(path.removeprefix("model.")), name).weight.add_(
                    part.merged
                )
    z = shared.embed_tokens(ids)
    places = torch.arange(ids.shape[1])[None]
    turned = shared.rotary_emb(z, places)
    size = ids.shape[1]
    hidden = torch.full((size, size), -torch.inf).triu(1)[None, None]
    given = dict(position_embeddings=turned, attention_mask=hidden)
    for index, layer in enumerate(shared.layers):
        x, attend = layer.input_layernorm(z), lambda own, x: own.self_attn(x, **given)[0]
        if separate:
            owns = [expert.layers[index] for expert in experts]
            z = z + sum(w * attend(own, x) for w, own in zip(weights, owns))
        else:
            z = z + attend(layer, x)
        x = layer.post_attention_layernorm(z)
        z = z + sum(w * expert.layers[index].mlp(x) for w, expert in zip(weights, experts))
    return seed.model.lm_head(shared.norm(z))


@pytest.mark.parametrize("separate", [True, False])
def test_a_mixture_is_the_weighted_sum_of_sublayers(separate, make, seed):
    model, weights = make(separate=separate), torch.tensor([[0.2, 0.0, 0.5, 0.3]])
    ids = torch.tensor([seed.encode(PROMPTS[0], "")[0]])
    with model.mixed(weights) as backbone, torch.no_grad():
        found = backbone(input_ids=ids, use_cache=False).logits
    wanted = by_hand(seed, model, weights[0].tolist(), ids, separate)
    assert torch.allclose(found, wanted, atol=1e-4)


def test_each_sequence_has_its_own_weights(make, seed, batch):
    model, task = make(), seed.task([])
    weights = torch.tensor([[0.0, 1, 0, 0], [0.5, 0, 0, 0.5], [0, 0, 0.1, 0.9]])
    with model.mixed(weights) as backbone, torch.no_grad():
        together = task.scores(backbone, batch)
    for row in range(3):
        one = {name: column[row : row + 1] for name, column in batch.items()}
        with model.mixed(weights[row : row + 1]) as backbone, torch.no_grad():
            assert torch.allclose(task.scores(backbone, one)[0], together[row], atol=1e-4)


@pytest.mark.parametrize("by", ["perplexity", "task_vector"])
def test_padding_and_company_change_nothing(by, make, seed, batch):
    model = make(by)
    together = answers(model, batch)
    for row in range(3):
        [one] = seed.batches(rows().select([row]))
        assert torch.allclose(answers(model, one)[0], together[row], atol=1e-4)


# ---- the scores


def test_perplexity_is_that_of_the_prompt(make, seed, batch):
    model, task = make(), seed.task([])
    found = model.by_perplexity(batch, task)
    for expert in range(4):
        network = dense(seed, model, expert)
        for row, prompt in enumerate(PROMPTS):
            ids = torch.tensor([seed.encode(prompt, "")[0]])
            with torch.no_grad():
                logits = network(input_ids=ids).logits[0, :-1]
            ppl = F.cross_entropy(logits.double(), ids[0, 1:]).exp()
            assert found[row, expert].item() == pytest.approx(1 / ppl.item(), rel=1e-3)


def test_a_prompt_of_one_token_tells_nothing(seed):
    prompts = torch.tensor([[5, 7], [0, 7]])
    batch = dict(prompts=prompts, prompt_mask=torch.tensor([[1, 1], [0, 1]]))
    with torch.no_grad():
        found = log_perplexity(seed, seed.backbone, batch, seed.task([]))
    assert found[0] > 0 == found[1]


def test_of_an_image_it_is_the_entropy_of_the_class_probabilities(tiny):
    seed, classes = tiny.seed, tiny.a.classes
    batch = next(iter(seed.batches(tiny.a.test)))
    task = seed.task(classes)
    with torch.no_grad():
        found = log_perplexity(seed, seed.backbone, batch, task)
        p = task.scores(seed.backbone, batch).double().softmax(-1)
    assert torch.allclose(found.double(), -(p * p.log()).sum(-1), atol=1e-5)


@pytest.mark.parametrize("attention", [None, []])
def test_cosines_are_those_of_dense_gradients_and_task_vectors(attention, make, seed, batch):
    model = make("task_vector", attention=attention)
    found = model.by_task_vector(batch, seed.task([]))
    assert not found.requires_grad and not found[:, 0].any()
    for row in range(3):
        network = seed.new_backbone().requires_grad_()
        one = {name: column[row : row + 1] for name, column in batch.items()}
        log_perplexity(seed, network, one, seed.task([])).sum().backward()
        at = lambda place: getattr(network.get_submodule(place[0]), place[1]).weight
        gradient = torch.cat([at(place).grad.flatten() for place in model.maps])
        for expert in (1, 2, 3):
            tau = torch.cat([change(model, p, expert).flatten() for p in model.maps]).detach()
            wanted = F.cosine_similarity(-gradient.double(), tau.double(), dim=0).item()
            assert found[row, expert].item() == pytest.approx(wanted, abs=1e-5)


def test_an_expert_that_went_down_the_gradient_is_chosen_first(make, seed, batch):
    "A step of descent on a text is the task vector that its own gradient finds."
    model, network = make("task_vector"), seed.new_backbone().requires_grad_()
    one = {name: column[:1] for name, column in batch.items()}
    log_perplexity(seed, network, one, seed.task([])).sum().backward()
    with torch.no_grad():
        for (path, name), part in model.maps.items():
            gradient = getattr(network.get_submodule(path), name).weight.grad
            u, s, v = torch.linalg.svd(gradient, full_matrices=False)
            part.a[2:5] = v[:3]
            part.b[2:5] = -(u[:, :3] * s[:3]).T
    found = model.by_task_vector(one, seed.task([]))[0]
    assert found.argmax() == 2 and found[2] > 0.3 > found[[0, 1, 3]].max()


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("by", ["perplexity", "task_vector"])
def test_weights_are_the_softmax_over_the_best(top_k, by, make, seed, batch):
    model, task = make(by, top_k=top_k), seed.task([])
    scores, weights = getattr(model, f"by_{by}")(batch, task), model.decide(batch, task)
    assert torch.allclose(weights.sum(-1), torch.ones(3)) and ((weights > 0).sum(-1) == top_k).all()
    for row in range(3):
        best = scores[row].argsort(descending=True)[:top_k]
        assert torch.allclose(weights[row, best], scores[row, best].softmax(0))
    assert torch.equal(model.shares(rows(), []), weights)


# ---- using it


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("by", ["perplexity", "task_vector"])
def test_it_comes_back_from_its_folder_and_says_what_is_wrong_with_one(
    by, separate, make, batch, tmp_path
):
    model = make(by, separate)
    folder = model.save(tmp_path / "saved")
    again = load_model(folder)
    assert again.settings == model.settings
    assert torch.equal(answers(again, batch), answers(model, batch))
    count = sum(p.numel() for p in model.backbone.parameters())
    assert again.count_parameters() == dict(total=count, active=count)


def test_choices_compared_as_texts_are_asked_one_by_one(make, seed):
    other = DecoderSeed(seed.model, seed.tokenizer, "text", scoring="text")
    model, data = make(of=other), rows(["left", "sat there", "minds"])
    [batch] = other.batches(data)
    with torch.no_grad():
        together = model.scorer(["A", "B", "C"])(batch)
        for row in range(3):
            [one] = other.batches(data.select([row]))
            assert torch.allclose(model.scorer(["A", "B", "C"])(one)[0], together[row], atol=1e-4)


@pytest.mark.parametrize("separate", [True, False])
def test_it_writes_what_it_would_score_highest(separate, make, seed):
    model = make(separate=separate)
    said = model.generate(PROMPTS[0], max_new_tokens=4, do_sample=False, pad_token_id=0)
    ids = torch.tensor([seed.encode(PROMPTS[0], "")[0]])
    given = dict(prompts=ids, prompt_mask=torch.ones_like(ids))
    with model.mixed(model.decide(given, seed.task([]))) as backbone, torch.no_grad():
        for _ in range(4):
            last = backbone(input_ids=ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, last[None, None]], 1)
    start = len(seed.encode(PROMPTS[0], "")[0])
    assert said == seed.tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_what_cannot_be_is_said(make, seed, batch):
    model, task = make(), seed.task([])
    with pytest.raises(ValueError, match="has not been"):
        task.scores(model.backbone, batch)
    with model.mixed(torch.ones(2, 4) / 4), pytest.raises(ValueError, match="2 sequences, not for"):
        task.scores(model.backbone, batch)
    with model.mixed(torch.ones(1, 4) / 4), pytest.raises(ValueError, match="use_cache=False"):
        model.backbone(input_ids=torch.tensor([[3, 4]]), use_cache=True)
    for wrong, said in (
        (dict(top_k=5), "top_k is 5, but must be 1 to 4"),
        (dict(ranks=[0, -1, 1, 1]), "ranks and scales"),
        (dict(experts=["seed", "a", "a", "b"]), "a"),
        (dict(experts=["seed", "a"]), "as many"),
    ):
        given = dict(experts=NAMES, ranks=RANKS, scales=SCALES) | wrong
        with pytest.raises(ValueError, match=said):
            SequenceFacts(**given)
    with pytest.raises(ValueError, match="no map of attention called 'x_proj'"):
        make(attention=["x_proj"])


def test_a_folder_with_other_tensors_is_refused(make, tmp_path):
    write_model(make(), tmp_path / "model")
    file = tmp_path / "model" / "experts.safetensors"
    whole = load_file(file)
    name = min(whole)
    save_file({n: t for n, t in whole.items() if n != name}, file)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        read_model(tmp_path / "model")
    save_file(whole | {"x": torch.ones(1)}, file)
    with pytest.raises(ValueError, match="has no use for x"):
        read_model(tmp_path / "model")
    save_file(whole | {name: torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"is \[1\], but must be"):
        read_model(tmp_path / "model")
