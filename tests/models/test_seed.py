"What every kind of seed shares, what a task asks of a backbone, and how right its answers are."

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import QUESTIONS, model, scores, seed_of

from harmomoe.base.artefacts import digest_weights
from harmomoe.models.seed import Accuracy, BitsPerByte, Task, first_names

# ---- copies, and other weights


@pytest.fixture(params=["image", "text"])
def kind(request, tiny_seed, tiny_benchmark):
    "A seed of each kind, samples for it, and the name of one of its weights in a saved folder."
    if request.param == "image":
        return tiny_seed, tiny_benchmark.pool.test, "visual.transformer.resblocks.0.mlp.c_fc.weight"
    return seed_of(), QUESTIONS, "model.layers.0.mlp.up_proj.weight"


def test_new_backbone_can_change_without_the_seed(kind):
    seed, _, _ = kind
    before, backbone = digest_weights(seed.whole), seed.new_backbone()
    assert not any(p.requires_grad for p in backbone.parameters())
    with torch.no_grad():
        for p in backbone.parameters():
            p.zero_()
    assert digest_weights(seed.whole) == before == seed.identity["weights"]


@pytest.mark.parametrize("asked", [True, False], ids=["after its identity was asked", "before"])
def test_changed_seed_is_the_same_but_for_its_name_and_what_was_added(asked, kind):
    seed, data, name = kind
    before, here = digest_weights(seed.whole), seed.changed("here", {})
    own = seed.whole.state_dict()
    change = torch.randn(own[name].shape, dtype=torch.float64)
    if asked:
        assert here.identity["weights"] == before  # the digest is kept from now on
    other = here.changed("there", {name: change})
    assert (here.name, other.name) == ("here", "there")
    theirs = other.whole.state_dict()
    assert torch.equal(theirs[name], own[name] + change.float()) and theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own if key != name)
    assert other.identity["weights"] == digest_weights(other.whole) != before
    differs = [key for key in seed.identity if seed.identity[key] != other.identity[key]]
    assert differs == ["name", "weights"]
    assert not torch.allclose(other.embed(data), seed.embed(data), atol=1e-3)
    assert digest_weights(seed.whole) == before == digest_weights(here.whole)


def test_weight_that_there_is_not_cannot_be_changed(kind):
    with pytest.raises(KeyError, match="visual.nothing"):
        kind[0].changed("other", {"visual.nothing": torch.zeros(1)})


@pytest.mark.parametrize("names", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_tied_weights_change_once_whichever_of_their_names_are_given(names):
    seed = seed_of("gemma2")
    tied = ["model.embed_tokens.weight", "lm_head.weight"]
    own = seed.whole.state_dict()
    change = torch.randn(own[tied[0]].shape)
    other = seed.changed("other", {tied[i]: change.clone() for i in names}).whole.state_dict()
    for name in own:
        wanted = own[name] + change if name in tied else own[name]
        assert torch.equal(other[name], wanted), name
    assert first_names(other)[tied[1]] == tied[0] == first_names(own)[tied[1]]
    untied = seed_of().whole.state_dict()
    assert first_names(untied) == {name: name for name in untied}


def test_two_changes_of_one_tensor_are_refused():
    seed = seed_of("gemma2")
    change = torch.ones(seed.whole.state_dict()["lm_head.weight"].shape)
    changes = {"model.embed_tokens.weight": change, "lm_head.weight": 2 * change}
    said = "lm_head.weight and model.embed_tokens.weight are one tensor, but change differently"
    with pytest.raises(ValueError, match=said):
        seed.changed("other", changes)


# ---- embeddings


def test_embedding_depends_on_the_type_that_it_is_computed_in(kind, monkeypatch):
    seed, data, _ = kind
    before, full = seed.identity, seed.embed(data)
    assert seed.embedding_identity == before and seed.embeds_in is None
    monkeypatch.setattr(seed, "embeds_in", torch.bfloat16)
    half = seed.embed(data)
    assert half.dtype == torch.float32 and not torch.equal(half, full)
    assert torch.cosine_similarity(half, full).min() > 0.999
    assert seed.embedding_identity == before | dict(embeds_in="torch.bfloat16")
    assert seed.identity == before
    assert {p.dtype for p in seed.backbone.parameters()} == {torch.float32}


def test_width_is_that_of_what_enters_an_ffn(kind):
    seed, data, _ = kind
    backbone, seen = seed.new_backbone(), []
    for path in seed.layers:
        note = lambda module, inputs: seen.append(inputs[0].shape[-1])
        backbone.get_submodule(path).register_forward_pre_hook(note)
    with torch.no_grad():
        found = seed.hidden(backbone, next(iter(seed.batches(data))))
    assert seen == [seed.width] * len(seed.layers) and found.shape[1] == seed.embedding_size


# ---- a task


class Given(Task):
    "A task whose answers stand in the batch."

    def scores(self, backbone, batch):
        return batch["scores"]


@pytest.fixture
def given(tiny_seed):
    return Given(tiny_seed, ["one", "two", "three"])


BATCH = dict(
    scores=torch.tensor([[1.0, 0, 0], [0, 2, 0], [5, 0, 4]]), targets=torch.tensor([0, 1, 2])
)


def test_task_without_scores_says_whose_it_is(tiny_seed):
    with pytest.raises(TypeError, match="a Task of tiny cannot be scored"):
        Task(tiny_seed, ["one"]).loss(tiny_seed.backbone, BATCH)


def test_loss_is_the_cross_entropy_of_the_scores(given):
    right = [math.exp(1) / (math.exp(1) + 2), math.exp(2) / (math.exp(2) + 2)]
    right.append(math.exp(4) / (math.exp(5) + 1 + math.exp(4)))
    wanted = -sum(map(math.log, right)) / 3
    assert given.loss(None, BATCH).item() == pytest.approx(wanted, rel=1e-6)


def test_loss_can_be_minimised(given):
    learnt = torch.zeros(3, 3, requires_grad=True)
    given.loss(None, BATCH | dict(scores=learnt)).backward()
    assert torch.allclose(learnt.grad, (F.softmax(torch.zeros(3, 3), 1) - torch.eye(3)) / 3)


def test_answers_are_judged_by_the_highest_score_and_add_up(given):
    each = given.judge(BATCH["scores"], BATCH)
    assert [one.n for one in each] == [1, 1, 1]
    found = each[0] + each[1] + each[2]
    assert found == Accuracy(2, 3) and found + found == Accuracy(4, 6)


def test_one_task_judges_whatever_backbone_it_is_given(tiny_seed, tiny_benchmark):
    domain, backbone = tiny_benchmark.clients[0], tiny_seed.new_backbone()
    task = tiny_seed.task(domain.classes)
    [batch] = tiny_seed.batches(domain.test, domain.classes)
    with torch.no_grad():
        before = task.scores(tiny_seed.backbone, batch)
        assert torch.equal(task.scores(backbone, batch), before)
        backbone.proj.neg_()
        assert torch.allclose(task.scores(backbone, batch), -before, atol=1e-5)
        assert torch.equal(task.scores(tiny_seed.backbone, batch), before)


# ---- how right


def test_interval_of_an_accuracy_is_wilsons():
    "Its ends are the shares p from which the observed one is 1.96 standard deviations away."
    for correct, n in ((8, 10), (1, 50), (997, 1000)):
        for end in Accuracy(correct, n).interval:
            p = end / 100
            away = abs(correct / n - p) / math.sqrt(p * (1 - p) / n)
            assert away == pytest.approx(1.959964, rel=1e-6)
    assert Accuracy(8, 10).interval == pytest.approx((49.01625, 94.33178), abs=1e-4)


@pytest.mark.parametrize("n", [1, 20, 10**6])
def test_interval_stays_between_nothing_and_all(n):
    none, every = Accuracy(0, n), Accuracy(n, n)
    assert none.percent == none.interval[0] == 0 and 0 < none.interval[1] < 100
    assert every.percent == every.interval[1] == 100 and 0 < every.interval[0] < 100


def test_bits_per_byte_are_nats_over_log_two_and_bytes():
    one, two = BitsPerByte(10 * math.log(2), 5), BitsPerByte(6 * math.log(2), 3)
    assert one.bits == pytest.approx(2) and (one + two).bytes == 8
    assert (one + two).bits == pytest.approx(16 / 8)
    assert (one + BitsPerByte(0, 5)).bits == pytest.approx(1)


def test_interval_of_bits_is_that_of_a_ratio_and_adds_up():
    "It holds the true ratio in some 95 % of draws, and parts of a data set give the same."
    generator, held = np.random.default_rng(0), []
    for _ in range(400):
        length = generator.integers(20, 400, 60).astype(float)
        nats = length * generator.gamma(4, 0.25, 60)  # on average 1 nat a byte
        each = zip(nats, length)
        parts = [BitsPerByte(a, b, 1, a * a, a * b, b * b) for a, b in each]
        whole = sum(parts[1:], parts[0])
        assert parts[0].interval is None and BitsPerByte(1.0, 2).interval is None
        low, high = whole.interval
        assert low < whole.bits < high
        held.append(low <= 1 / math.log(2) <= high)
    assert 0.91 < np.mean(held) < 0.98


def test_quality_grows_with_what_is_better():
    assert Accuracy(2, 3).quality > Accuracy(1, 3).quality
    assert BitsPerByte(1.0, 3).quality > BitsPerByte(2.0, 3).quality


def test_scores_of_a_seed_for_text_are_those_of_its_task():
    seed = seed_of()
    task = seed.task(["A", "B", "C"])
    [batch] = seed.batches(QUESTIONS, task.classes)
    with torch.no_grad():
        assert torch.equal(task.scores(model(), batch), scores(seed))
