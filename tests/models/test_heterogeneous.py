"Experts of different architectures: shared vocabulary, projectors, routing, training, folders."

import pytest
import torch
from datasets import Dataset
from networks import moved, weights
from safetensors.torch import load_file, save_file

from harmomoe.models.decoder import untrained_decoder
from harmomoe.models.heterogeneous import (
    HeterogeneousFacts,
    Projector,
    join,
    shared_rows,
    token_rows,
)
from harmomoe.models.model import load_model, read_model, write_model
from harmomoe.models.training import Training, train

LINES = [("One evening", " she left."), ("Two birds", " sat there on a roof."), ("It", " rains.")]
PROMPTS, ANSWERS = map(list, zip(*LINES))


def rows(prompts=PROMPTS, answers=ANSWERS):
    few = dict(choices=[[]] * len(prompts), label=[0] * len(prompts))
    named = dict(class_name=["text"] * len(prompts))
    return Dataset.from_dict(dict(prompt=prompts, answer=answers) | few | named)


@pytest.fixture(scope="module")
def experts():
    "Of three widths, the last with another tokenizer."
    other = rows(["pack my box "], ["with five dozen jugs"])
    return dict(
        wide=untrained_decoder([rows()], hidden_size=48, tie_word_embeddings=True),
        deep=untrained_decoder([rows()], random_state=1, num_hidden_layers=3),
        foreign=untrained_decoder([other], random_state=2, hidden_size=24),
    )


@pytest.fixture(scope="module")
def model(experts):
    return join(experts)


@torch.no_grad()
def answers(model, data=rows(), batch_size=None):
    score = model.scorer(["text"])
    return torch.cat([score(batch) for batch in model.seed.batches(data, batch_size=batch_size)])


# ---- vocabulary


def test_rows_of_another_tokenizer_are_those_of_its_tokens(experts):
    own, other = experts["wide"].tokenizer, experts["foreign"].tokenizer
    weight = torch.randn(len(other), 5, dtype=torch.float64)
    size = len(own)
    found = token_rows(own, other, weight, size)
    assert found.shape == (size, 5)
    vocabulary, theirs, cut, same = own.get_vocab(), other.get_vocab(), 0, 0
    for token, index in vocabulary.items():
        if token in theirs:
            assert torch.equal(found[index], weight[theirs[token]])
            same += 1
        elif "\ufffd" not in (text := own.decode([index])) and text:
            ids = other(text, add_special_tokens=False)["input_ids"]
            assert torch.allclose(found[index], weight[ids].mean(0))
            cut += len(ids) > 1
    assert same > 200 and cut > 0


def test_rows_of_the_same_tokenizer_are_as_they_are(experts):
    own = experts["wide"].tokenizer
    weight = torch.randn(len(own), 3)
    assert torch.equal(token_rows(own, own, weight, len(own)), weight)
    more = token_rows(own, own, weight, len(own) + 2)
    assert torch.equal(more[: len(own)], weight)
    assert torch.allclose(more[len(own) :], weight.mean(0).expand(2, -1))
    assert torch.equal(token_rows(own, own, weight, 5), weight[:5])


@pytest.mark.parametrize("head", [False, True])
def test_shared_rows_are_the_mean_padded_with_zeros(head, experts):
    both = {name: experts[name] for name in ("wide", "deep")}
    found = shared_rows([*both.values()], head)
    part = lambda seed: seed.model.lm_head if head else seed.model.model.embed_tokens
    wide, deep = (part(seed).weight for seed in both.values())
    assert found.shape == (len(wide), 48)
    assert torch.allclose(found[:, 32:], wide[:, 32:] / 2)
    assert torch.allclose(found[:, :32], (wide[:, :32] + deep) / 2)


# ---- network


def test_padded_projectors_start_as_identities_and_random_ones_do_not():
    x = torch.randn(2, 4, 6)
    assert torch.equal(Projector(6, 6, 5, True)(x), x)
    assert torch.equal(Projector(6, 4, 5, True)(x), x[..., :4])
    wider = Projector(6, 8, 5, True)(x)
    assert torch.equal(wider[..., :6], x) and not wider[..., 6:].any()
    assert Projector(6, 8, 5, False)(x).std() > 0


def test_one_expert_with_padded_projectors_is_that_expert(experts):
    "Whose embedding and head are not averaged with anything."
    model = join({"wide": experts["wide"]}, top_k=1, start="padded")
    task = experts["wide"].task(["text"])
    [batch] = experts["wide"].batches(rows())
    with torch.no_grad():
        wanted = task.scores(experts["wide"].backbone, batch)
    assert torch.allclose(answers(model), wanted, atol=1e-4)


@torch.no_grad()
def by_hand(model, ids, prompt):
    "Logits of one sequence."
    network = model.backbone
    embedded = network.embedding.weight[ids]
    scores = network.router.weight @ embedded[:prompt].mean(0)
    best = scores.argsort(descending=True)[: network.top_k]
    total = 0
    for weight, expert in zip(scores[best].softmax(0), best.tolist()):
        given = network.into[expert](embedded)[None]
        found = network.bodies[expert](inputs_embeds=given).last_hidden_state[0]
        total = total + weight * network.out[expert](found)
    return total @ network.head.weight.T


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_logits_are_what_the_formulas_say(top_k, experts):
    model = join(experts, top_k=top_k)
    asked, said = model.seed.encode(*LINES[1])
    ids = torch.tensor([asked + said])
    mask = torch.ones_like(ids)
    prompts = torch.tensor([[1] * len(asked) + [0] * len(said)])
    with torch.no_grad():
        found = model.backbone(ids, mask, prompts).logits[0]
    assert torch.allclose(found, by_hand(model, ids[0], len(asked)), atol=1e-4)


def test_padding_company_and_what_follows_change_nothing(model):
    together = answers(model)
    assert torch.allclose(answers(model, batch_size=1), together, atol=1e-4)
    other = rows(PROMPTS, ["", " was here.", " goes on and on."])
    assert torch.equal(model.shares(rows()), model.shares(other))  # the prompt decides


def test_writing_with_caches_is_reading_again(model):
    ids = model.seed.encode(PROMPTS[0], "")[0]
    count, tokens = len(ids), [*ids]
    for _ in range(5):
        tokens.append(by_hand(model, torch.tensor(tokens), count)[-1].argmax().item())
    said = model.seed.tokenizer.decode(tokens[count:], skip_special_tokens=True)
    assert model.generate(PROMPTS[0], 5) == said


# ---- training, folders, counts


def test_all_parameters_learn_and_the_experts_stay_as_they_were(experts):
    before = {name: weights(seed.model) for name, seed in experts.items()}
    model, how = join(experts, top_k=3), Training(6, 3, 3e-3, "adamw")
    start = weights(model.backbone)
    losses = train(model.seed, model.backbone, rows(), ["text"], how)
    assert losses[-1] < losses[0] - 0.5
    unused = {f"bodies.{i}.embed_tokens.weight" for i in range(3)}
    assert moved(model.backbone, start) == start.keys() - unused
    for name, seed in experts.items():
        assert not moved(seed.model, before[name])


def test_it_comes_back_from_its_folder(model, tmp_path):
    again = load_model(model.save(tmp_path / "saved"))
    assert torch.equal(answers(again), answers(model))
    assert again.settings == model.settings and again.count_parameters() == model.count_parameters()
    assert again.generate(PROMPTS[0], 5) == model.generate(PROMPTS[0], 5)


def test_the_same_random_state_gives_the_same_model(experts, model):
    assert torch.equal(answers(join(experts)), answers(model))
    assert not torch.equal(answers(join(experts, random_state=1)), answers(model))


def test_parameters_are_counted(model, experts):
    size = lambda part: sum(p.numel() for p in part.parameters())
    own = []
    for seed in experts.values():
        d, body = seed.embedding_size, seed.model.model
        projectors = 2 * 48 * (48 + d) + 2 * 48 + d + 48  # two MLPs with biases
        own.append(size(body) - size(body.embed_tokens) + 1 + projectors)
    shared = 2 * 48 * model.settings.vocabulary + 3 * 48
    assert model.count_parameters() == dict(
        total=shared + sum(own), active=shared + sum(sorted(own)[1:])
    )


def test_what_cannot_be_is_said(experts, model, tmp_path):
    with pytest.raises(ValueError, match="top_k is 4"):
        join(experts, top_k=4)
    with pytest.raises(ValueError, match="b/c"):
        join({"b/c": experts["wide"]}, top_k=1)
    with pytest.raises(ValueError, match="must be positive"):
        HeterogeneousFacts(["a"], 0, 1, 1)
    write_model(model, tmp_path / "model")
    file = tmp_path / "model" / "experts.safetensors"
    whole = load_file(file)
    save_file({n: t for n, t in whole.items() if n != "router.weight"}, file)
    with pytest.raises(ValueError, match="lacks the tensor router.weight"):
        read_model(tmp_path / "model")
    save_file(whole | {"router.weight": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"router.weight is \[1\]"):
        read_model(tmp_path / "model")
