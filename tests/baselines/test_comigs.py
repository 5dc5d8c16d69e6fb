"Rounds with generalists that are shared and specialists that stay at home."

import pytest
import torch
from watching import equal

from harmomoe.baselines.comigs import Participant, take_rounds
from harmomoe.config.settings import changed

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
FACTORS = {"a.c_fc", "a.c_proj", "b.c_fc", "b.c_proj"}


def halves(model, rank):
    "The factors of a client's generalist, and of its specialist."
    tables = [table for layer in model.layers for table in (layer.a, layer.b)]
    parts = [part for table in tables for part in table.values()]
    return [part[:rank] for part in parts], [part[rank:] for part in parts]


def test_it_ends_with_one_generalist_the_mean_and_a_specialist_for_each(play, tiny):
    played, rank = play("comigs"), tiny.settings.expert.rank
    models = played.model.members
    assert len(played.exchanged) == 3 * tiny.settings.expert.epochs
    last = [returned for _, _, returned in played.exchanged[-3:]]
    assert not equal(last[0], last[1])
    mean = [torch.stack(parts).double().mean(0) for parts in zip(*last)]
    first = halves(models["a"], rank)
    for model in models.values():
        generalist, specialist = halves(model, rank)
        assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(generalist, mean))
        assert equal(generalist, first[0]) and equal(specialist, first[1]) == (model is models["a"])
        assert model.experts == ["generalist", "specialist"]


def test_factors_of_the_generalist_are_exchanged_and_nothing_else(play, tiny):
    rank = tiny.settings.expert.rank
    shapes = [(rank, size) for _ in tiny.seed.layers for size in (64, 256, 256, 64)]
    for _, mean, returned in play("comigs").exchanged:
        for parts in (mean, returned):
            assert all(type(part) is torch.Tensor and not part.requires_grad for part in parts)
            assert [tuple(part.shape) for part in parts] == shapes
    for participant in play("comigs").received:
        shown = participant.generalist()
        assert isinstance(shown, list) and [tuple(part.shape) for part in shown] == shapes


def test_everybody_gets_the_same_mean_in_every_round(play):
    rounds = play("comigs").exchanged
    for first in range(0, len(rounds), 3):
        for _, mean, _ in rounds[first : first + 3]:
            assert equal(mean, rounds[first][1])
        if first:
            last = [returned for _, _, returned in rounds[first - 3 : first]]
            assert equal(rounds[first][1], [torch.stack(parts).mean(0) for parts in zip(*last)])


def test_it_does_not_depend_on_the_order_of_the_clients(play, tiny, logits):
    backwards = [Participant(tiny.public, domain) for domain in tiny.clients[::-1]]
    found = logits(take_rounds(backwards, tiny.public))
    for name, scores in logits(play("comigs").model).items():
        assert torch.allclose(found[name], scores, atol=1e-3)


def test_experts_are_trained_on_train_and_routers_on_validation(tiny, rows, monkeypatch):
    public, calls = tiny.public.with_config(changed(tiny.settings, {"expert.epochs": 3})), []
    participants = [Participant(public, domain) for domain in tiny.clients[:2]]
    batches = tiny.seed.batches

    def noted(data, *args, **named):
        [name] = {domain for domain, *_ in rows(data)}
        [model] = [one.model for one in participants if one.name == name]
        learning = [n for n, p in model.backbone.named_parameters() if p.requires_grad]
        calls.append(({n.split(".mlp.")[1] for n in learning}, rows(data)))
        return batches(data, *args, **named)

    monkeypatch.setattr(tiny.seed, "batches", noted)
    take_rounds(participants, public)
    wanted = []
    for domain in tiny.clients[:2]:
        wanted += [(FACTORS, rows(domain.train)), ({"router.vectors"}, rows(domain.validation))]
    assert calls == 3 * wanted  # as many rounds as epochs
