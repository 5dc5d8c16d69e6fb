"Sparse local training: targets move and nothing else does, in whole and in compressed models."

import copy

import pytest
import torch
from networks import moved, weights
from small_mixtures import build, built, every_kind, passages
from torch.optim.optimizer import register_optimizer_step_post_hook

from harmomoe.models.mixture import FAMILIES
from harmomoe.models.training import Training
from harmomoe.rounds.experts import RoutedExperts
from harmomoe.rounds.training import (
    TargetLoss,
    compress,
    draw,
    held_bytes,
    learning,
    train_targets,
)

TARGETS, CLASSES = [[1, 3], [2]], ["text"]
HELD = [[1, 2, 3], [2, 4]]
ADAMW = Training(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1, batch_size=4)
SGD = Training(optimizer="sgd", learning_rate=0.1, weight_decay=0.1, batch_size=4)


def learn(model, steps=3, training=ADAMW, targets=TARGETS, random_state=0):
    return train_targets(model, passages(), CLASSES, targets, training, steps, random_state)


def state_of(model, targets=TARGETS):
    return RoutedExperts(model.backbone).state(targets)


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@torch.no_grad()
def logits(model, number=6):
    batch = next(iter(model.seed.batches(passages(number=number), CLASSES)))
    given = batch["input_ids"], batch["attention_mask"], batch["asked"]
    return model.seed.logits(model.backbone, *given, 20)


@every_kind
@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("held", [None, HELD], ids=["whole", "compressed"])
def test_every_target_moves_and_nothing_else_not_a_bit(kind, training, held):
    model = build(kind)
    if held:
        model = compress(model, held)
    view = RoutedExperts(model.backbone)
    before, every = weights(model.backbone), view.state(view.all_targets)
    required = {n: p.requires_grad for n, p in model.backbone.named_parameters()}
    learn(model, training=training)
    after, state = view.state(view.all_targets), view.state(TARGETS)
    assert {n for n in after if not torch.equal(after[n], every[n])} == state.keys()
    for name, x in state.items():
        if kind in FAMILIES:
            assert (x != every[name]).any(-1).all(), name  # each row of each matrix
    view.load_state({name: every[name] for name in state}, TARGETS)
    assert not moved(model.backbone, before)
    assert required == {n: p.requires_grad for n, p in model.backbone.named_parameters()}


@every_kind
def test_a_step_on_slices_is_that_of_the_whole_tensors(kind):
    "Plain SGD with whole tensors that learn, targets looked at only."
    model, other = build(kind), build(kind)
    plain = Training(optimizer="sgd", learning_rate=0.1, momentum=0, weight_decay=0, batch_size=12)
    learn(model, 1, plain)
    view = RoutedExperts(other.backbone)
    for name, p in other.backbone.named_parameters():
        p.requires_grad_(("experts" in name and "shared" not in name) or ".a." in name)
        if ".b." in name:
            p.requires_grad_(True)
    learning_too = [p for p in other.backbone.parameters() if p.requires_grad]
    batch = next(iter(other.seed.batches(passages(), CLASSES, 12)))
    other.seed.task(CLASSES).loss(other.backbone, batch).backward()
    with torch.no_grad():
        for p in learning_too:
            p -= 0.1 * p.grad
    one, two = state_of(model), view.state(TARGETS)
    before = state_of(build(kind))
    for name in one:
        change = one[name] - before[name]
        assert (one[name] - two[name]).abs().max() <= 1e-3 * change.abs().max(), name


@every_kind
def test_a_model_that_holds_all_its_experts_is_the_model(kind):
    model = build(kind)
    smaller = compress(model, [range(5)] * 2)
    assert torch.equal(logits(model), logits(smaller))
    one, two = learn(model), learn(smaller)
    assert one == two and same(state_of(model), state_of(smaller))


@every_kind
def test_a_restricted_router_takes_the_softmax_of_what_is_held(kind):
    model = build(kind)
    before = weights(model.backbone)
    smaller = compress(model, HELD)
    assert not moved(model.backbone, before)
    reference = copy.deepcopy(model)
    for layer, held in zip(RoutedExperts(reference.backbone).layers, HELD):
        if kind in FAMILIES:
            bias = torch.full((5,), -torch.inf)
            bias[held] = 0
            linear = torch.nn.functional.linear

            def forward(z, gate=layer.module.gate, bias=bias, linear=linear):
                said = linear(z.reshape(-1, z.shape[-1]), gate.weight, bias)
                best, places = said.float().softmax(-1).topk(gate.top_k)
                if getattr(gate, "norm_topk_prob", kind == "mixtral"):
                    best = best / best.sum(-1, keepdim=True)
                return said, best, places

            layer.module.gate.forward = forward
        else:
            layer.router.active = torch.tensor([e in (0, *held) for e in range(5)])
    found, wanted = logits(smaller), logits(reference)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert (found - logits(model)).abs().max() > 1e-2 * wanted.abs().max()


@every_kind
def test_states_of_a_compressed_model_fit_the_whole_one(kind):
    model = build(kind)
    smaller, view = compress(model, HELD), RoutedExperts(model.backbone)
    part = RoutedExperts(smaller.backbone)
    own = [[e for e in held if e in may] for held, may in zip(HELD, view.all_targets)]
    assert part.all_targets == own and part.experts == view.experts == 5
    assert same(part.state(own), view.state(own))
    anchor = view.anchor(TARGETS)
    learn(smaller)
    assert not same(state_of(smaller), state_of(model))
    view.load_state(state_of(smaller), TARGETS)
    assert view.anchor(TARGETS) == anchor and same(state_of(smaller), state_of(model))
    with pytest.raises(ValueError, match="no target can be 0, only 1, 2, 3"):
        learn(smaller, targets=[[0], []])
    smallest = compress(smaller, [[3], [4]])
    left = RoutedExperts(smallest.backbone)
    assert left.all_targets == [[3], [4]] and same(left.state([[3], [4]]), view.state([[3], [4]]))
    observed = left.observe(model.seed, passages())
    assert observed.chosen[:, [1, 2]].max() == 0 and observed.chosen[0, 3] > 0


@every_kind
def test_what_a_worker_holds_is_counted(kind):
    model = build(kind)
    smaller = compress(model, HELD)
    view, found = RoutedExperts(model.backbone), {}
    for name, one in (("whole", model), ("compressed", smaller)):
        trained = learn(one)
        state = state_of(one)
        size = sum(x.nbytes for x in state.values())
        assert trained.payload == size == trained.memory.gradients
        assert trained.memory.moments == 2 * size + 4 * len(state)  # and a count of steps each
        assert trained.memory.weights == held_bytes(one.backbone)
        assert trained.share == size / 4 / sum(p.numel() for p in one.backbone.parameters())
        assert trained.memory.total == sum(vars(trained.memory).values())
        found[name] = trained.memory.weights
    left_out = [[e for e in may if e not in held] for may, held in zip(view.all_targets, HELD)]
    gone = view.size(left_out).bytes
    rows = 0
    if kind in FAMILIES:
        rows = (10 - sum(map(len, HELD))) * 32 * 4  # of routers
    else:  # the expert and the scale of each row of factors
        rows = sum(layer.module.ranks[e] * 12 for layer, o in zip(view.layers, left_out) for e in o)
    assert found["whole"] - found["compressed"] == gone + rows


@every_kind
def test_trainings_repeat_themselves(kind):
    states = []
    for random_state in (0, 0, 1):
        model = build(kind)
        learn(model, random_state=random_state)
        states.append(state_of(model))
    assert same(*states[:2]) and not same(states[0], states[2])


@every_kind
def test_the_model_is_whole_again_whatever_happens(kind):
    model = build(kind)
    names, structure = set(model.backbone.state_dict()), str(model.backbone)
    config = getattr(model.backbone.config, "_experts_implementation", None)
    view = RoutedExperts(model.backbone)
    with pytest.raises(RuntimeError, match="stop"):
        with learning(view, TARGETS) as own:
            assert own.keys() == view_names(kind, view)
            assert str(model.backbone) != structure
            assert [p for p in model.backbone.parameters() if p.requires_grad]
            raise RuntimeError("stop")
    wild = Training(optimizer="sgd", learning_rate=1e30, batch_size=4)
    with pytest.raises(FloatingPointError):
        learn(model, 6, wild)
    assert set(model.backbone.state_dict()) == names and str(model.backbone) == structure
    assert getattr(model.backbone.config, "_experts_implementation", None) == config


def view_names(kind, view):
    return RoutedExperts(build(kind).backbone).state(TARGETS).keys()


def test_parameters_are_in_the_memory_of_the_model():
    for kind in ("olmoe", "unified"):
        model, view = built(kind)
        before = weights(model.backbone)
        held = held_bytes(model.backbone)
        with learning(view, [[1], []]) as own, torch.no_grad():
            assert held_bytes(model.backbone) == held
            for p in own.values():
                p.add_(1)
        assert moved(model.backbone, before)


def test_steps_are_counted_by_the_optimiser():
    model = build("olmoe")
    twice = Training(optimizer="sgd", learning_rate=0.1, batch_size=2, accumulation=2)
    steps = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        assert learn(model, 7).steps == len(steps) == 7
        learn(model, 3, twice)
    finally:
        handle.remove()
    assert len(steps) == 10


def test_draws_use_everything_equally_often():
    found = draw(5, 17, 3)
    assert len(found) == 17 and {found.count(place) for place in range(5)} == {3, 4}
    assert sorted(found[:5]) == sorted(found[5:10]) == [0, 1, 2, 3, 4] and found[:5] != found[5:10]
    assert draw(5, 17, 3) == found != draw(5, 17, 4)
    with pytest.raises(ValueError, match="no samples"):
        draw(0, 3)


def test_what_cannot_be_trained_or_held():
    model = build("unified")
    for held, what in (
        ([[1]], "1 layers"),
        ([[1], [7]], "layer 1 holds no expert 7"),
    ):
        with pytest.raises(ValueError, match=what):
            compress(model, held)
    with pytest.raises(ValueError, match="layer 1 would hold no expert"):
        compress(build("olmoe"), [[1], []])
    assert RoutedExperts(compress(model, [[1], []]).backbone).layers[1].held == [
        0
    ]  # the seed's own
    with pytest.raises(ValueError, match="steps is 0"):
        learn(model, 0)
    with pytest.raises(ValueError, match="no samples"):
        train_targets(model, passages().select([]), CLASSES, TARGETS, ADAMW, 1)
    with pytest.raises(ValueError, match="no target can be 0"):
        learn(model, targets=[[0], []])


@every_kind
def test_the_loss_of_a_state_leaves_the_model_as_it_was(kind):
    model, data = build(kind), passages("spanish", 20, "test")
    judge = TargetLoss(model, data, CLASSES, TARGETS)
    before, own = weights(model.backbone), state_of(model)
    other = {name: x + 0.3 for name, x in own.items()}
    some = [3, 1, 17]
    first, second = judge.loss(own, some), judge.loss(other, some)
    assert first == judge.loss(own, some) != second and not moved(model.backbone, before)
    alone = [judge.loss(own, [place]) for place in some]
    assert abs(sum(alone) / 3 - first) < 1e-4
    changed = build(kind)
    RoutedExperts(changed.backbone).load_state(other, TARGETS)
    changed = TargetLoss(changed, data, CLASSES, TARGETS)
    assert changed.loss(own, some) == first and changed.fingerprint == judge.fingerprint
    for wrong in (own | {"9.9.x": own[min(own)]}, {n: x * torch.nan for n, x in own.items()}):
        with pytest.raises(ValueError):
            judge.loss(wrong, some)
    with pytest.raises(ValueError, match="no samples"):
        judge.loss(own, [])
    assert not moved(model.backbone, before)


def test_image_experts_learn_too(tiny, merge_with):
    model = merge_with(form="logistic", top_k=2)
    targets = [[1, 2], [3]]
    view = RoutedExperts(model.backbone)
    anchor, before = view.anchor(targets), view.state(view.all_targets)
    judge = TargetLoss(model, tiny.a.test, tiny.a.classes, targets)
    smaller = compress(model, [[1, 2], [1, 3]])
    trained = train_targets(smaller, tiny.a.train, tiny.a.classes, targets, ADAMW, 4)
    state = RoutedExperts(smaller.backbone).state(targets)
    view.load_state(state, targets)
    after = view.state(view.all_targets)
    assert {n for n in after if not torch.equal(after[n], before[n])} == state.keys()
    assert view.anchor(targets) == anchor and trained.payload == view.size(targets).bytes
    places = [*range(len(tiny.a.test))]
    assert judge.loss(state, places) != judge.loss({n: before[n] for n in state}, places)
