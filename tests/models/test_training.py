"""The loop: what it minimises, how it steps, and that a training which was interrupted ends as if
it had not been."""

import errno
import multiprocessing
import os
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from families import ABC, QUESTIONS, cut, seed_of
from peft import LoraConfig, get_peft_model
from torch import nn

from harmomoe.base.process import seeded
from harmomoe.models import training as module
from harmomoe.models.training import Checkpoint, Training, check_finite, train

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
ADAMW = dict(learning_rate=3e-3, optimizer="adamw", weight_decay=0.0)
SHORT = Training(epochs=2, batch_size=6, **ADAMW)
# a step is the learning rate times the gradient, and no more
PLAIN = Training(epochs=1, batch_size=64, learning_rate=1.0, momentum=0.0, weight_decay=0.0)


def weights(backbone):
    return {name: p.detach().clone() for name, p in backbone.named_parameters() if p.requires_grad}


def same(one, two):
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def adapted(seed, dropout=0.0):
    "A backbone whose adapters learn."
    config = LoraConfig(r=2, target_modules=list(seed.ffn.linears), lora_dropout=dropout)
    with seeded(0):
        return get_peft_model(seed.new_backbone(), config)


def last_layer(seed):
    "A backbone whose last FFN learns."
    backbone = seed.new_backbone()
    backbone.get_submodule(seed.layers[-1]).requires_grad_(True)
    return backbone


@pytest.fixture(scope="module")
def images(tiny_seed, tiny_benchmark):
    "A seed, 20 samples and their classes."
    domain = tiny_benchmark.clients[0]
    return tiny_seed, domain.train.select(range(20)), domain.classes


@pytest.fixture(scope="module")
def texts():
    "A seed for text, 18 samples and the letters of the choices."
    from datasets import concatenate_datasets

    return seed_of(), concatenate_datasets([QUESTIONS] * 5).select(range(18)), ABC


# ---- settings


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(optimizer="adam"), "optimizer is 'adam', but must be one of sgd, adamw"),
        (dict(precision="fp16"), "precision is 'fp16', but must be one of no, bf16"),
        (dict(batch_size=0), "batch_size is 0"),
        (dict(epochs=-1), "epochs is -1"),
        (dict(learning_rate=0), "learning_rate is 0"),
        (dict(momentum=-0.1), "momentum is -0.1"),
        (dict(weight_decay=-1), "weight_decay is -1"),
        (dict(warmup_steps=-1), "warmup_steps is -1"),
        (dict(accumulation=0), "accumulation is 0"),
        (dict(clip=0.0), "clip is 0.0"),
        (dict(clip=-1.0), "clip is -1.0"),
        (dict(clip=float("inf")), "clip is inf, but must be a number above 0 .* or None"),
        (dict(epochs=True), "epochs is True, but must be a whole number from 0 to 100,000"),
        (dict(epochs=1.0), "epochs is 1.0"),
        (dict(batch_size=None), "batch_size is None, but must be a whole number"),
        (dict(learning_rate="fast"), "learning_rate is 'fast', but must be a number above 0"),
        (dict(learning_rate=10**400), "learning_rate is 1000"),
        (dict(momentum=1.0), "momentum is 1.0, but must be a number at least 0 and below 1"),
    ],
    ids=str,
)
def test_settings_are_checked(wrong, said):
    with pytest.raises(ValueError, match=said):
        Training(**wrong)


# ---- what is minimised


def test_the_loss_is_that_of_the_seeds_task_unless_another_is_given(images):
    seed, data, classes = images
    task, modes = seed.task(classes), []

    def entropy(backbone, batch):
        modes.append(backbone.training)
        return task.loss(backbone, batch)

    start, usual, again = (adapted(seed) for _ in range(3))
    losses = train(seed, usual, data, classes, SHORT)
    assert train(seed, again, data, classes, SHORT, loss=entropy) == losses
    assert same(usual, again) and not same(usual, start) and losses[-1] < losses[0]
    assert len(modes) == 2 * 4 and all(modes)  # in the mode of training
    assert not any(part.training for part in again.modules())  # and out of it in the end


def test_no_gradient_goes_through_the_attention_of_cudnn(images):
    seed, data, classes = images
    allowed, task = torch.backends.cuda.cudnn_sdp_enabled, seed.task(classes)
    seen, before = [], allowed()

    def loss(backbone, batch):
        seen.append(allowed())
        return task.loss(backbone, batch)

    train(seed, last_layer(seed), data, classes, SHORT, loss=loss)
    assert seen and not any(seen) and allowed() == before


def test_another_loss_is_what_goes_down(images):
    seed, data, classes = images
    size = lambda backbone, batch: seed.hidden(backbone, batch).square().mean()
    usual, shrunk = adapted(seed), adapted(seed)
    train(seed, usual, data, classes, SHORT)
    losses = train(seed, shrunk, data, classes, replace(SHORT, epochs=3), loss=size)
    assert losses[2] < losses[0] and not same(usual, shrunk)


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(images):
    "The last batch is smaller than the others."
    seed, data, classes = images
    seen = []

    def noted(backbone, batch):
        seen.append((len(batch["targets"]), len(seen)))
        return seed.task(classes).loss(backbone, batch) * 0 + seen[-1][1]

    [loss] = train(seed, adapted(seed), data, classes, replace(SHORT, epochs=1), loss=noted)
    assert [size for size, _ in seen] == [6, 6, 6, 2]
    assert loss == pytest.approx((0 * 6 + 1 * 6 + 2 * 6 + 3 * 2) / 20)


def test_what_requires_no_gradient_stays(images):
    seed, data, classes = images
    backbone = last_layer(seed)
    before = {name: p.clone() for name, p in backbone.named_parameters()}
    train(seed, backbone, data, classes, SHORT)
    moved = {name for name, p in backbone.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.startswith(seed.layers[-1])}


def test_random_state_decides_the_order_and_the_outer_generators_are_left_alone(images):
    seed, data, classes = images
    found = []
    for outer, random_state in ((1, 5), (2, 5), (3, 6)):
        np.random.seed(outer)
        torch.manual_seed(outer)
        found.append(adapted(seed, dropout=0.3))
        train(seed, found[-1], data, classes, SHORT, random_state)
        after = np.random.rand(), torch.rand(1).item()
        np.random.seed(outer)
        torch.manual_seed(outer)
        assert after == (np.random.rand(), torch.rand(1).item())
    assert same(found[0], found[1]) and not same(found[0], found[2])


def test_no_epochs_change_nothing(images):
    seed, data, classes = images
    backbone = adapted(seed)
    assert train(seed, backbone, data, classes, replace(SHORT, epochs=0)) == []
    assert same(backbone, adapted(seed)) and not backbone.training


# ---- what diverges


def test_a_loss_that_is_not_finite_ends_the_training_at_once(images):
    seed, data, classes = images
    wrong = lambda backbone, batch: seed.hidden(backbone, batch).mean() * torch.nan
    with pytest.raises(FloatingPointError, match="the loss is nan in epoch 1: lower the learning"):
        train(seed, adapted(seed), data, classes, SHORT, loss=wrong)
    high = Training(epochs=9, batch_size=6, learning_rate=1e9)
    with pytest.raises(FloatingPointError, match=r"in epoch \d: lower .*rate.*1000000000.0"):
        train(seed, adapted(seed), data, classes, high)


# ---- steps


class Line(nn.Module):
    "Two numbers whose gradients are known."

    def __init__(self):
        super().__init__()
        self.fast, self.slow = (nn.Parameter(torch.zeros(1)) for _ in range(2))


def slope(line, batch):
    "Falls by 3 and 4: a gradient of norm 5."
    return -(3 * line.fast + 4 * line.slow).sum()


def moved(images, training, **options):
    "Where two numbers come to, and how far each step took them."
    seed, data, classes = images
    line, places = Line(), []

    def noted(line, batch):
        places.append((line.fast.item(), line.slow.item()))
        return slope(line, batch)

    train(seed, line, data, classes, training, loss=noted, **options)
    return np.diff([*places, (line.fast.item(), line.slow.item())], axis=0)


@pytest.mark.parametrize("clip, size", [(None, 5), (10.0, 5), (5.0, 5), (2.0, 2), (1e-3, 1e-3)])
def test_clip_bounds_the_norm_of_every_step_and_keeps_its_direction(clip, size, images):
    steps = moved(images, replace(PLAIN, batch_size=6, clip=clip))
    assert len(steps) == 4
    assert steps == pytest.approx(np.tile([3 * size / 5, 4 * size / 5], (4, 1)), rel=1e-3)


def test_clip_bounds_the_sum_of_accumulated_gradients_not_each(images):
    steps = moved(images, replace(PLAIN, batch_size=10, clip=5.0, accumulation=2))
    assert steps == pytest.approx(np.array([[0, 0], [3, 4]]), rel=1e-5)


def test_what_is_to_be_faster_is_by_its_factor_whatever_the_optimizer(images):
    for optimizer in ("sgd", "adamw"):
        training = replace(PLAIN, optimizer=optimizer, learning_rate=1e-3, batch_size=6)
        plain = moved(images, training)
        quick = moved(images, training, faster=dict(fast=100.0))
        assert quick[:, 0] == pytest.approx(100 * plain[:, 0], rel=1e-4)
        assert quick[:, 1] == pytest.approx(plain[:, 1], rel=1e-4)
    none = moved(images, training, faster=dict(nothing=7.0))  # a name that there is not
    assert none == pytest.approx(plain)


def test_the_learning_rate_rises_over_the_warm_up_in_steps_not_batches(images):
    steps = moved(images, replace(PLAIN, batch_size=6, warmup_steps=2, epochs=2))
    assert steps[:, 0] == pytest.approx([1.5] + [3] * 7)
    steps = moved(images, replace(PLAIN, batch_size=6, warmup_steps=2, epochs=2, accumulation=2))
    assert steps[:, 0] == pytest.approx([0, 1.5, 0, 3] + [0, 3] * 2)
    both = moved(images, replace(PLAIN, batch_size=6, warmup_steps=4), faster=dict(fast=2.0))
    assert both == pytest.approx(np.outer([1, 2, 3, 4], [1.5, 1]))


def test_weights_that_are_not_finite_after_the_last_step_are_an_error_too(images):
    with pytest.raises(FloatingPointError, match="of the model is not finite: .*Lower the learn"):
        moved(images, replace(PLAIN, learning_rate=3e38))
    with pytest.raises(FloatingPointError, match="^b of it is not finite"):
        check_finite(dict(a=torch.zeros(2), b=torch.tensor([0, -torch.inf])), "it")


@pytest.mark.parametrize("accumulation", [2, 3, 100])
def test_batches_that_are_left_at_the_end_of_an_epoch_make_a_step_of_their_own(
    accumulation, images
):
    "Four batches an epoch."
    steps = moved(images, replace(PLAIN, batch_size=6, epochs=2, accumulation=accumulation))
    made = [index + 1 for index, step in enumerate(steps) if step.any()]
    assert made == {2: [2, 4, 6, 8], 3: [3, 4, 7, 8], 100: [4, 8]}[accumulation]


def test_accumulated_halves_are_as_good_as_whole_batches(images):
    seed, data, classes = images
    whole, halves = adapted(seed), adapted(seed)
    one = train(seed, whole, data, classes, replace(SHORT, batch_size=10))
    two = train(seed, halves, data, classes, replace(SHORT, batch_size=5, accumulation=2))
    assert one == pytest.approx(two, rel=1e-4)
    for first, second in zip(weights(whole).values(), weights(halves).values()):
        assert torch.allclose(first, second, atol=1e-4)


# ---- bfloat16


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_bf16_computes_products_in_bfloat16_and_keeps_float32_weights(kind, request):
    seed, data, classes = request.getfixturevalue(kind)
    types, half, full = set(), adapted(seed), adapted(seed)
    first = half.get_submodule(f"base_model.model.{seed.layers[0]}").get_submodule(
        seed.ffn.inner[0]
    )
    first.register_forward_hook(lambda module, inputs, output: types.add(output.dtype))
    losses = train(seed, half, data, classes, replace(SHORT, precision="bf16"))
    assert types == {torch.bfloat16}
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert losses == pytest.approx(train(seed, full, data, classes, SHORT), rel=0.05)
    assert not same(half, full) and all(torch.isfinite(p).all() for p in half.parameters())


def test_precision_of_one_training_does_not_reach_the_next(images):
    seed, data, classes = images
    first, between, last = (adapted(seed) for _ in range(3))
    train(seed, first, data, classes, SHORT)
    train(seed, between, data, classes, replace(SHORT, precision="bf16"))
    train(seed, last, data, classes, SHORT)
    assert same(first, last) and not same(first, between)
    assert seed.embed(data).dtype == torch.float32


def test_device_of_one_training_does_not_reach_the_next(images, monkeypatch):
    "As after a training on a GPU, which Accelerate would hold the process to."
    seed, data, classes = images
    first, last = adapted(seed), adapted(seed)
    train(seed, first, data, classes, SHORT)
    for state in (AcceleratorState, PartialState):
        monkeypatch.setitem(state._shared_state, "device", torch.device("cuda"))
    train(seed, last, data, classes, SHORT)
    assert same(first, last)
    assert PartialState._shared_state["device"].type == "cpu"


# ---- interrupted, and taken up


def resumed(given, training, folder, cuts, dropout=0.0, **options):
    "The backbone of a training that is interrupted once or more, its losses and batches."
    seed, data, classes = given
    state = dict(training=training, random_state=3, checkpoint=Checkpoint(folder, seconds=0))
    for after in cuts:
        with pytest.raises(KeyboardInterrupt):
            train(
                seed, adapted(seed, dropout), data, classes, loss=cut(seed, classes, after), **state
            )
    backbone, seen, task = adapted(seed, dropout), [], seed.task(classes)

    def noted(backbone, batch):
        seen.append(batch)
        return task.loss(backbone, batch)

    return backbone, train(seed, backbone, data, classes, loss=noted, **state), len(seen)


# changes of the settings, and LoRA's dropout
CASES = {
    "adamw": (dict(), 0.0),
    "sgd": (dict(optimizer="sgd", learning_rate=0.01, weight_decay=1e-4), 0.3),
    "accumulation": (dict(accumulation=3), 0.3),
    "clip and warm-up": (dict(clip=0.1, warmup_steps=6), 0.0),
    "bf16": (dict(precision="bf16"), 0.3),
}
EPOCH = 4  # batches
PLACES = dict(
    at_the_first_batch=[0],
    at_the_second=[1],
    in_the_middle=[EPOCH + 2],
    at_the_end_of_an_epoch=[EPOCH],
    again_and_again=[3, 1, 2, 4],
)


@pytest.fixture(scope="module")
def whole():
    "Trainings that nothing interrupted, each made once."
    made = {}

    def run(name, given, training, dropout):
        if name not in made:
            seed, data, classes = given
            backbone = adapted(seed, dropout)
            made[name] = backbone, train(seed, backbone, data, classes, training, 3)
        return made[name]

    return run


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["images", "texts"])
def test_an_interrupted_training_ends_as_if_nothing_had_happened(
    kind, case, place, whole, request, tmp_path
):
    given, (changes, dropout) = request.getfixturevalue(kind), CASES[case]
    batch = -(-len(given[1]) // EPOCH)
    training = replace(SHORT, epochs=3, batch_size=batch, **changes)
    expected, losses = whole((kind, case), given, training, dropout)
    backbone, found, batches = resumed(given, training, tmp_path, PLACES[place], dropout)
    assert found == losses and same(backbone, expected)
    # what is made again is what waited for its step
    again = batches - (3 * EPOCH - sum(PLACES[place]))
    assert 0 <= again <= len(PLACES[place]) * (training.accumulation - 1)


def test_what_is_finished_is_not_trained_again(images, tmp_path):
    seed, data, classes = images
    where, first, second = Checkpoint(tmp_path, seconds=0), adapted(seed), adapted(seed)
    losses = train(seed, first, data, classes, SHORT, checkpoint=where)
    nothing = cut(seed, classes, 0)
    assert train(seed, second, data, classes, SHORT, loss=nothing, checkpoint=where) == losses
    assert same(first, second)


def test_faster_parts_are_taken_up_with_their_factors(images, tmp_path):
    seed, data, classes = images
    faster = {"base_model.model.transformer.resblocks.0": 10.0}
    whole, half = adapted(seed), adapted(seed)
    losses = train(seed, whole, data, classes, SHORT, faster=faster)
    state = dict(faster=faster, checkpoint=Checkpoint(tmp_path, seconds=0))
    with pytest.raises(KeyboardInterrupt):
        train(seed, half, data, classes, SHORT, loss=cut(seed, classes, 3), **state)
    again = adapted(seed)
    assert train(seed, again, data, classes, SHORT, **state) == losses and same(again, whole)


def test_a_checkpoint_leaves_the_training_as_it_is_without(images, tmp_path):
    seed, data, classes = images
    plain, watched = adapted(seed, 0.3), adapted(seed, 0.3)
    losses = train(seed, plain, data, classes, SHORT)
    where = Checkpoint(tmp_path, seconds=0)
    assert train(seed, watched, data, classes, SHORT, checkpoint=where) == losses
    assert same(plain, watched)


# ---- the file


def test_nothing_is_written_before_its_time(images, tmp_path):
    seed, data, classes = images
    train(seed, adapted(seed), data, classes, SHORT, checkpoint=Checkpoint(tmp_path, seconds=60))
    assert list(tmp_path.iterdir()) == [] and Checkpoint(tmp_path).read() is None
    assert not Checkpoint(tmp_path).due() and Checkpoint(tmp_path, seconds=0).due()


def told(where, connection):
    "Write where no file may be larger than 100 kB; send what is said."
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        where.write(dict(weight=torch.zeros(100_000)), {})
    except OSError as error:
        connection.send((error.errno, error.strerror))


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path):
    where = Checkpoint(tmp_path)
    where.write(dict(weight=torch.ones(1)), dict(epoch=1))
    before = where.file.read_bytes()
    receive, send = multiprocessing.Pipe(duplex=False)
    alone = multiprocessing.get_context("fork").Process(target=told, args=(where, send))
    alone.start()
    alone.join()
    assert alone.exitcode == 0
    number, said = receive.recv()
    assert number == errno.EFBIG
    assert said.startswith(f"{where.file} cannot be written: File too large. Raise the limit")
    assert os.listdir(tmp_path) == [where.file.name] and where.file.read_bytes() == before
    nowhere = Checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"{nowhere.file} cannot be written: No such file"):
        nowhere.write({}, {})


def test_what_cannot_be_written_leaves_the_last_checkpoint_whole(images, tmp_path, monkeypatch):
    seed, data, classes = images
    where = Checkpoint(tmp_path, seconds=0)
    with pytest.raises(KeyboardInterrupt):
        loss = cut(seed, classes, 3)
        train(seed, adapted(seed), data, classes, SHORT, loss=loss, checkpoint=where)
    before = where.file.read_bytes()
    save = module.save_file

    def full_disk(tensors, path, **options):
        save(tensors, path, **options)
        path.write_bytes(path.read_bytes()[:100])
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(module, "save_file", full_disk)
        train(seed, adapted(seed), data, classes, SHORT, checkpoint=where)
    assert where.file.read_bytes() == before
    whole, again = adapted(seed), adapted(seed)
    losses = train(seed, whole, data, classes, SHORT)
    assert train(seed, again, data, classes, SHORT, checkpoint=where) == losses
    assert same(again, whole) and [path.name for path in tmp_path.iterdir()] == [where.file.name]


@pytest.mark.parametrize("content", [b"", b"cut", None], ids=["empty", "cut", "no file"])
def test_a_damaged_checkpoint_counts_as_none(content, images, tmp_path):
    "As a machine may leave it that loses power."
    seed, data, classes = images
    where, whole, again = Checkpoint(tmp_path), adapted(seed), adapted(seed)
    losses = train(seed, whole, data, classes, SHORT)
    if content is not None:
        where.file.write_bytes(content)
    where.file.with_suffix(".partial").write_bytes(b"half of one")
    assert where.read() is None
    assert train(seed, again, data, classes, SHORT, checkpoint=where) == losses
    assert same(again, whole)


def test_a_checkpoint_holds_what_learns_and_no_sample(images, tmp_path):
    seed, data, classes = images
    where, backbone = Checkpoint(tmp_path, seconds=0), adapted(seed)
    train(seed, backbone, data, classes, SHORT, checkpoint=where)
    tensors, place = where.read()
    learning = weights(backbone)
    assert {name for name in tensors if name.startswith("weight ")} == {
        f"weight {name}" for name in learning
    }
    states = {f"state {i} {key}" for i in range(len(learning)) for key in ("exp_avg", "exp_avg_sq")}
    states |= {f"state {i} step" for i in range(len(learning))}
    assert tensors.keys() - {f"weight {name}" for name in learning} == states | {"order", "random"}
    assert place.keys() == {"epoch", "batch", "step", "summed", "losses"}
    assert all(torch.equal(tensors[f"weight {name}"], p) for name, p in learning.items())
