"What a method is: which parts of a bundle its server gets to see, and what they weigh."

from dataclasses import replace

import pytest
from watching import alike

from harmomoe.baselines.method import PARTS, AllData, OneShot, Rounds, harmomoe
from harmomoe.baselines.methods import METHODS
from harmomoe.config.settings import changed
from harmomoe.server.server import unify

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def test_a_part_that_bundles_do_not_have_cannot_be_sent():
    with pytest.raises(ValueError, match="no part 'images', only adapter, routing, proxies"):
        OneShot("mine", unify, sends=("adapter", "images"))


@pytest.mark.parametrize("sends", [(), ("adapter",), ("routing", "proxies"), tuple(PARTS)])
def test_what_is_not_sent_is_withheld(sends, tiny):
    bundle, method = tiny.bundles[0], replace(harmomoe, sends=sends)
    [shown] = method.shown([bundle])
    assert (shown.client, shown.scale, shown.folder) == ("a", bundle.scale, None)
    assert shown.manifest is None
    assert shown.factors is bundle.factors if "adapter" in sends else shown.factors == {}
    assert shown.routing is (bundle.routing if "routing" in sends else None)
    assert shown.ids is (bundle.ids if "proxies" in sends else None)
    assert bundle.folder is not None and bundle.manifest is not None
    files = [bundle.folder / file for part in sends for file in PARTS[part]]
    assert method.bytes_sent([bundle]) == sum(file.stat().st_size for file in files)


def test_what_a_method_adjusts_holds_for_clients_and_server(tiny, tmp_path):
    seen = []

    def serve(bundles, public):
        seen.append(public.config.finetune.epochs)
        seen.extend(bundle.rank for bundle in bundles)

    def adjust(config):
        expert, finetune = replace(config.expert, rank=2), replace(config.finetune, epochs=7)
        return replace(config, expert=expert, finetune=finetune)

    OneShot("mine", serve, adjust).run(tiny.public, tiny.clients[:1], tmp_path)
    assert seen == [7, 2] and tiny.settings.expert.rank == 4


def test_harmomoe_among_the_methods_is_harmomoe(play, tiny, logits):
    model, played = unify(tiny.bundles, tiny.public), play("harmomoe").model
    assert alike(logits(model), logits(played)) and model.losses == played.losses


@pytest.mark.parametrize("kind", [OneShot, AllData, Rounds])
def test_names_that_clients_cannot_have_are_said_before_anybody_trains(kind, tiny, tmp_path):
    wrong = [replace(tiny.b, name=name) for name in ("my photos", "../b", "seed", "x" * 65, "A")]
    for domain in wrong:
        with pytest.raises(ValueError, match=f"{domain.name!r}"):
            kind("mine", None).run(tiny.public, [tiny.a, domain], tmp_path)
    assert not any(tmp_path.iterdir())


def test_only_methods_that_keep_a_guarantee_may_give_one(tiny, tmp_path):
    "Before any work."
    pytest.importorskip("dp_accounting")
    public = tiny.public.with_config(changed(tiny.settings, {"privacy.epsilon": 8}))
    for name in ("unrestricted_moe", "comigs", "flexolmo", "expert_all_data"):
        with pytest.raises(ValueError, match=f"privacy.epsilon is 8, but {name} has no guarantee"):
            METHODS[name].run(public, tiny.clients, tmp_path)
    assert not any(tmp_path.iterdir())
    for name in ("harmomoe", "btm", "zeroshot", "proxies_only", "moa"):
        METHODS[name].check(public.config)
