"""Rows of a federation that grows: what they hold, what is shared between them, and what a run that
was stopped does when it is started again."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from harmomoe.base.artefacts import stages_run
from harmomoe.bench import scale
from harmomoe.bench.compare import Row, run_row
from harmomoe.bench.experiment import read_config
from harmomoe.bench.scale import (
    RelatedSource,
    Trial,
    first_choices,
    flat,
    nested,
    own_share,
    read_flat,
    samples_a_second,
    told,
    weight_bytes,
    write_flat,
)
from harmomoe.config.settings import changed
from harmomoe.config.source import Source
from harmomoe.models.ensemble import Ensemble, Personal
from harmomoe.models.evaluate import read_measured
from harmomoe.models.model import Model


@pytest.fixture(scope="module")
def source(tiny_seed_folder, tiny_folder):
    return Source(str(tiny_seed_folder), data=str(tiny_folder), clients="a,b", pool="pool")


@pytest.fixture(scope="module")
def config(tiny_settings):
    "Clients send means for the paper's router, and moments for that of this trial."
    router = dict(form="moments", lam=1.0, top_k=2, seed_expert=False)
    named = {f"router.{name}": value for name, value in router.items()}
    return changed(tiny_settings, named | {"routing.forms": "mean"})


@pytest.fixture(scope="module")
def trial(config, source):
    return Trial("harmomoe", config, source)


@pytest.fixture(scope="module")
def measured(trial, tmp_path_factory):
    "Folder and facts of a trial with two members; tests may add rows."
    folder = tmp_path_factory.mktemp("scale")
    return folder, trial.measure(folder)


@pytest.fixture(scope="module")
def unified(trial, measured):
    return trial.serve(measured[0])[0]


@pytest.fixture(scope="module")
def data(source):
    return source.benchmark(0).clients[0].test


# ---- who is a member


def test_sets_hold_all_smaller_ones_in_one_order():
    names = [*"abcdefgh"]
    sets = nested(names, [2, 5, 8])
    assert sorted(sets[8]) == names and sets[5] == sets[8][:5] and sets[2] == sets[8][:2]
    assert nested(names, [8]) == {8: sets[8]} and sets[8] != tuple(names)
    assert nested(names, [8], random_state=1)[8] != sets[8]


@pytest.mark.parametrize("size", [0, 9])
def test_a_set_of_more_or_fewer_than_there_are_is_refused(size):
    with pytest.raises(ValueError, match=f"size is {size}, but must be 1 to 8"):
        nested("abcdefgh", [2, size])


def test_a_source_with_related_members_keeps_pool_and_others(source):
    pair = RelatedSource(**vars(source), related="a:copy")
    found, plain = pair.benchmark(0), source.benchmark(0)
    assert [client.name for client in found.clients] == ["a", "a-copy", "b"]
    assert found.pool is plain.pool and found.clients[2] is plain.clients[1]
    assert pair.benchmark(0) is found
    with pytest.raises(ValueError, match="unknown client 'z'"):
        replace(pair, related="z:copy").benchmark(0)


# ---- a row


def test_a_row_counts_what_a_comparison_counts(trial, measured, tmp_path):
    facts = measured[1]
    row = run_row(Row("harmomoe", trial.config), trial.source, tmp_path)
    for key in ("accuracy", "joint", "public", "parameters", "bytes", "routing"):
        assert facts[key] == row[key], key
    assert list(facts["accuracy"]) == ["a", "b"] and read_measured(facts).domains["a"].n == 12


def test_a_row_says_what_everything_cost(measured):
    facts = measured[1]
    for stages in facts["client"].values():
        assert list(stages) == ["description", "expert", "packing"] and min(stages.values()) > 0
    seconds = facts["server"]
    assert seconds["looked at"] == 2 and seconds["serving"] > seconds["merging"] > 0
    assert seconds["fine-tuning"] == seconds["serving"] - seconds["merging"]
    assert facts["speed"] > 0 and facts["seed_speed"] > 0


def test_nothing_is_computed_twice(trial, measured):
    with stages_run() as ran:
        assert trial.measure(measured[0]) == measured[1]
    assert ran == []


def test_a_larger_set_shares_the_work_of_its_members(trial, measured):
    more = replace(trial, source=replace(trial.source, clients="a,b,c"))
    with stages_run() as ran:
        facts = more.measure(measured[0])
    assert ran.count("expert") == ran.count("relevance") == 1
    assert {name: facts["client"][name] for name in "ab"} == measured[1]["client"]
    assert facts["server"]["looked at"] == 1


def test_another_router_comes_from_the_same_bundles(trial, measured):
    with stages_run() as ran:
        facts = replace(trial, system="harmomoe:paper").measure(measured[0])
    assert not {"expert", "routing"} & {*ran}
    assert facts["bytes"] == measured[1]["bytes"]
    assert facts["routed"]["a"]["experts"] == ["seed", "a", "b"]
    assert facts["routed"] != measured[1]["routed"]


def test_a_router_of_a_form_that_nobody_sends_is_refused(trial, tmp_path):
    few = changed(trial.config, {"routing.forms": ""})
    with pytest.raises(ValueError, match="'mean', but clients send moments: name it in"):
        replace(trial, config=few, system="harmomoe:paper").measure(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "system, said",
    [("fedavg", "no method 'fedavg'"), ("harmomoe:best", "router is 'best'")],
)
def test_a_system_that_there_is_not_is_refused(trial, system, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        replace(trial, system=system).measure(tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- a run that was stopped


def test_a_stopped_row_goes_on_with_what_its_clients_did(trial, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(scale, "judge", stop)
        with pytest.raises(KeyboardInterrupt):
            trial.measure(tmp_path)
    with stages_run() as ran:
        facts = trial.measure(tmp_path)
    assert [kind for kind in ran if not kind.startswith("claim")] == [f"trial-{trial.row.kind}-2"]
    assert all(None not in stages.values() for stages in facts["client"].values())


def test_seconds_of_a_stage_that_was_stopped_are_missing(trial, tmp_path, monkeypatch):
    expert, calls = scale.STAGES["expert"], []

    def stopped_once(client):
        calls.append(client.domain.name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return expert(client)

    monkeypatch.setitem(scale.STAGES, "expert", stopped_once)
    with pytest.raises(KeyboardInterrupt):
        trial.measure(tmp_path)
    facts = trial.measure(tmp_path)
    assert calls == ["a", "a", "b"]
    assert facts["client"]["a"]["expert"] is None and facts["client"]["b"]["expert"] > 0
    assert facts["client"]["a"]["description"] > 0 and facts["client"]["a"]["packing"] > 0


# ---- where samples go


def test_first_choices_are_those_of_the_largest_weight(unified, data):
    seed, layer, seen = unified.seed, unified.layers[0], []
    watch = layer.router.register_forward_hook(lambda *given: seen.append(given[2]))
    for batch in seed.batches(data):
        seed.hidden(unified.backbone, batch)
    watch.remove()
    weights, experts = (torch.cat([one[k] for one in seen]) for k in (0, 1))
    first = experts.flatten(0, 1)[range(weights.flatten(0, 1).shape[0]), 0]
    names, share = first_choices(unified, data, ["a", "b"])
    assert names == ["a", "b"] and share.shape == (len(unified.layers), 2)
    assert np.allclose(share[0], np.bincount(first, minlength=2) / len(first))


def test_who_is_told_decides_nothing_and_the_other_layers_do(unified, data):
    _, free = first_choices(unified, data, [])
    last = len(unified.layers) - 1
    with told(unified, "b", [last]):
        _, share = first_choices(unified, data, [])
    assert np.array_equal(share[:last], free[:last]) and share[last].tolist() == [0, 1]
    with told(unified, "b", range(last + 1)), unified.only("b"):
        everywhere = first_choices(unified, data, [])[1]
    assert (everywhere[:, 1] == 1).all()
    assert np.array_equal(first_choices(unified, data, [])[1], free)  # as it was


def test_an_ensemble_decides_once_and_a_soup_not_at_all(tiny_seed, data):
    two = [tiny_seed.backbone, tiny_seed.backbone]
    vectors = torch.zeros(2, tiny_seed.embedding_size)
    names, share = first_choices(
        Ensemble(tiny_seed, two, vectors, torch.tensor([0.0, 1.0])), data, ["x", "y"]
    )
    assert names == ["x", "y"] and share.tolist() == [[0, 1]]
    assert first_choices(Model(tiny_seed, tiny_seed.backbone), data, ["x", "y"]) is None


def test_adapters_decide_in_each_map(trial, measured, data):
    model, _ = replace(trial, system="arrow").serve(measured[0])
    names, share = first_choices(model, data, [])
    assert names == ["a", "b"] and share.shape == (len(model.maps), 2)
    assert np.allclose(share.sum(1), 1)


# ---- memory and speed


def test_weights_that_are_shared_count_once(tiny_seed):
    own, other = Model(tiny_seed, tiny_seed.backbone), Model(tiny_seed, tiny_seed.new_backbone())
    one = weight_bytes(own)
    state = tiny_seed.backbone.state_dict().values()
    assert one == sum(tensor.nbytes for tensor in state)
    assert weight_bytes(Personal(dict(a=own, b=own))) == one
    assert weight_bytes(Personal(dict(a=own, b=other))) == 2 * one
    assert weight_bytes(Ensemble(tiny_seed, [other.backbone])) == one


def test_speed_is_that_of_the_fastest_round_after_the_first(tiny_seed, data, source, monkeypatch):
    ticks = iter([0, 1, 10, 14, 20, 22, 30, 35])  # rounds of 1, 4, 2 and 5 seconds
    monkeypatch.setattr(scale, "clock_of", lambda device: lambda: next(ticks))
    model, classes = Model(tiny_seed, tiny_seed.backbone), source.benchmark(0).clients[0].classes
    assert samples_a_second(model, data, classes, batch_size=8) == 4


# ---- as stored


def test_rows_come_back_as_they_were(trial, measured, tmp_path):
    row = flat(trial, measured[1], "tiny")
    assert row["clients"] == ["a", "b"] and row["members"] == "nested"
    assert row["config"]["router"]["form"] == "moments"
    write_flat([row], tmp_path / "tiny.json.gz")
    first = (tmp_path / "tiny.json.gz").read_bytes()
    assert read_flat(tmp_path) == [json.loads(json.dumps(row))]
    write_flat([row], tmp_path / "tiny.json.gz")
    assert (tmp_path / "tiny.json.gz").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.json.gz"]


def test_a_file_without_rows_is_named(tmp_path):
    (tmp_path / "odd.json.gz").write_bytes(b"rows")
    with pytest.raises(ValueError, match="odd.json.gz holds no rows"):
        read_flat(tmp_path)


def test_own_share_is_the_mean_over_clients_and_places():
    seen = dict(a=[[0.5, 0.5], [1, 0]], b=[[0.2, 0.8], [0.4, 0.6]])
    routed = {name: dict(experts=["a", "b"], share=share) for name, share in seen.items()}
    assert own_share(dict(routed=routed)) == pytest.approx((0.75 + 0.7) / 2)
    assert own_share(dict(routed={})) is None


def test_members_that_are_copies_do_alike_and_are_taken_for_each_other(config, source, tmp_path):
    pair = RelatedSource(**vars(source), related="a:copy")
    plain = replace(config, finetune=replace(config.finetune, epochs=0))
    facts = Trial("matching experts", plain, pair).measure(tmp_path)
    assert facts["accuracy"]["a"] == facts["accuracy"]["a-copy"]
    routed = Trial("harmomoe", plain, pair).measure(tmp_path)["routed"]
    assert routed["a"]["share"] == routed["a-copy"]["share"]


def test_the_preset_of_a_run_sends_both_forms():
    config, _ = read_config("embedded", "", 0, router="preset")
    row = Trial("harmomoe:paper", config, Source(data="scripts", clients="greek,thai")).row
    assert row.config.router.sent_form in config.routing.sent(config.router)
