"""The page of oracles, on the tiny benchmark: what is told is what the model then does, rows are
kept, and routers that nobody can tell anything are refused."""

from pathlib import Path

import pytest

from harmomoe.base.artefacts import stages_run
from harmomoe.models.evaluate import judge_each, measure, read_measured
from harmomoe.models.model import Model
from harmomoe.models.weights import open_seed

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "oracles.ipynb"
SETTINGS = (
    "expert.epochs=1, gate.epochs=1, finetune.epochs=1, proxies.candidates=40, proxies.number=12, "
    "routing.public_samples=40"
)
pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module")
def parameters(tiny_seed_folder, tiny_folder, tmp_path_factory):
    place = dict(backbone=str(tiny_seed_folder), data=str(tiny_folder), clients="a,b", pool="pool")
    out = str(tmp_path_factory.mktemp("oracles"))
    return place | dict(settings=SETTINGS, random_states=1, out=out)


@pytest.fixture(scope="module")
def ran(parameters, run_cells):
    return run_cells(PAGE, parameters)


def test_who_is_told_everything_keeps_all_of_the_seed(ran, parameters, tiny_benchmark):
    counts = ran["found"][0]["ways"]["told everything"]
    seed = open_seed(parameters["backbone"])
    pool = tiny_benchmark.pool
    alone = measure(Model(seed, seed.backbone), pool.test, pool.classes)
    assert read_measured(counts).public == (alone,)
    assert ran["found"][0]["ways"]["told client or public"]["public"] == counts["public"]


def test_shares_are_whole_and_domains_in_their_order(ran):
    assert list(ran["table"].columns) == ["a", "b", "average", "public", "joint"]
    assert list(ran["shown"].index) == list(ran["WAYS"])
    assert ran["shares"].sum(axis=1).tolist() == pytest.approx([100, 100, 100])


def test_at_once_every_layer_takes_the_last_ones_decision(ran, parameters, tiny_benchmark):
    experiment = ran["open_experiment"](
        "oracles", texts=False, **{k: v for k, v in parameters.items() if k != "random_states"}
    )
    model, seen = experiment.server.unify(), []
    batch = next(iter(model.seed.batches(tiny_benchmark.clients[0].test)))
    last = model.layers[-1].router
    note = last.register_forward_hook(lambda router, given, output: seen.append(output))
    model.seed.hidden(model.backbone, batch)
    note.remove()
    for alone in (False, True):
        taken = []
        with ran["at_once"](model, alone):
            notes = [
                layer.router.register_forward_hook(lambda router, given, out: taken.append(out))
                for layer in model.layers
            ]
            model.seed.hidden(model.backbone, batch)
        for one in notes:
            one.remove()
        weights, experts = seen[0]
        for found, chosen in taken[len(model.layers) :]:  # those before are of the first look
            assert chosen.equal(experts)
            assert found.argmax(-1).eq(0).all()
            assert found.equal(weights) or alone
            assert not alone or found[..., 1:].eq(0).all()
    assert not any(layer.router._forward_hooks for layer in model.layers)


def test_each_image_goes_where_the_classifier_sends_it(ran, parameters):
    given = {k: v for k, v in parameters.items() if k != "random_states"}
    experiment = ran["open_experiment"]("oracles", texts=False, **given)
    benchmark, model = experiment.benchmark, experiment.server.unify()
    way = "by a classifier of all images"
    tests = {client.name: client.test for client in benchmark.clients}
    tests["seed"] = benchmark.pool.test
    truth = {name: [name] * len(test) for name, test in tests.items()}
    case = ran["Case"](model, None, truth)
    everything = ran["judged"](case, benchmark, "told everything")
    assert ran["judged"](case, benchmark, way) == everything
    kinds, test, space = ["seed", "b", "a"], tests["a"], dict(own=benchmark.clients[0].classes)
    case.named = truth | dict(a=[kinds[row % 3] for row in range(len(test))])
    right = []
    for kind in kinds:
        with model.only(kind):
            right.append(judge_each(model, test, space)["own"])
    mixed = sum(right[row % 3][row].correct for row in range(len(test)))
    assert read_measured(ran["judged"](case, benchmark, way)).domains["a"].correct == mixed


def test_the_classifier_has_seen_all_images(ran, parameters, tiny_benchmark):
    given = {k: v for k, v in parameters.items() if k != "random_states"}
    experiment = ran["open_experiment"]("oracles", texts=False, **given)
    benchmark = experiment.benchmark
    named = ran["named_by_all"](experiment.public, benchmark)
    tests = {client.name: client.test for client in benchmark.clients}
    tests["seed"] = benchmark.pool.test
    assert {name: len(said) for name, said in named.items()} == {
        name: len(test) for name, test in tests.items()
    }
    for name, said in named.items():  # more often right than a guess
        right = said.count(name) / len(said)
        assert right > 1 / 3 and right == ran["found"][0]["named"][name]


def test_a_second_run_computes_nothing(ran, parameters, run_cells):
    with stages_run() as made:
        again = run_cells(PAGE, parameters)
    assert not made and again["found"] == ran["found"]


def test_without_the_seeds_expert_nobody_can_tell(parameters, run_cells, tmp_path):
    asked = parameters | dict(preset="ratios", out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="no seed's expert"):
        run_cells(PAGE, asked)
    assert not (tmp_path / "out" / "clients").exists()
    with pytest.raises(ValueError, match="random_states is 0"):
        run_cells(PAGE, parameters | dict(random_states=0))
