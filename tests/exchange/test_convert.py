"Other people's adapters and checkpoints as experts. PEFT and transformers are the reference."

import copy
import json
import shutil
import warnings

import huggingface_hub
import pytest
import torch
from exchange.small_decoders import GATED, edit, logits, merged, moved
from safetensors.torch import load_file

import harmomoe.exchange.convert as convert
from harmomoe.base.schema import one_line
from harmomoe.exchange.convert import (
    find_adapter,
    low_rank,
    read_adapter,
    read_checkpoint,
    same_model,
    write_adapter,
)
from harmomoe.models.weights import open_seed

# Adapters


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_ffn_adapter_is_used_as_it_is(seed, foreign, use_rslora):
    folder, model = foreign(use_rslora=use_rslora)
    expert, tensors = read_adapter(folder, seed), load_file(folder / "adapter_model.safetensors")
    assert (expert.rank, expert.scale) == (4, 4 if use_rslora else 2)
    assert not expert.others and expert.lost == 0
    assert len(expert.account) == 6 and set(expert.account.values()) == {"used"}
    for (path, linear), (a, b) in expert.factors.items():
        assert torch.equal(a, tensors[f"base_model.model.{path}.{linear}.lora_A.weight"])
        assert torch.equal(b, tensors[f"base_model.model.{path}.{linear}.lora_B.weight"])
    assert torch.allclose(logits(merged(seed, expert)), logits(model), atol=1e-5)
    assert not expert.report().values.any()


@pytest.mark.parametrize(
    "settings",
    [
        dict(
            rank_pattern={"layers.0.mlp.up_proj": 7, "down_proj": 2},
            alpha_pattern={"layers.1.mlp.down_proj": 3},
        ),
        dict(rank_pattern={"up_proj": 6}, use_rslora=True),
        dict(layers_to_transform=[1]),
        dict(target_modules=["up_proj"]),
        dict(target_modules=r".*\.0\.mlp\.(gate|down)_proj"),
        dict(init_lora_weights="orthogonal", task_type="CAUSAL_LM", lora_dropout=0.1),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_patterns_and_parts_give_what_peft_gives(seed, foreign, settings):
    folder, model = foreign(**settings)
    expert = read_adapter(folder, seed)
    assert len(expert.factors) == 6
    assert {len(a) for a, _ in expert.factors.values()} == {expert.rank}
    assert torch.allclose(logits(merged(seed, expert)), logits(model), atol=2e-5)
    if "init_lora_weights" not in settings:
        assert (logits(model) - logits(seed.backbone)).abs().max() > 0.1


def test_attention_is_refused_ignored_or_averaged(seed, foreign):
    folder, model = foreign(target_modules="all-linear")
    told = "q_proj|k_proj|v_proj|o_proj.*and 7 more.*% of the squared norm.*average"
    with pytest.raises(ValueError, match=told):
        read_adapter(folder, seed, "refuse")
    before, after = seed.backbone.state_dict(), copy.deepcopy(model).merge_and_unload().state_dict()
    change = {name: (after[name] - before[name]).double().norm().item() ** 2 for name in before}
    outside = sum(size for name, size in change.items() if "self_attn" in name)
    ignored = read_adapter(folder, seed, "ignore")
    assert ignored.lost == pytest.approx(outside / sum(change.values()), rel=1e-4)
    assert not ignored.others and len(ignored.account) == 14
    assert set(ignored.account.values()) == {"ignored", "used"}
    kept = read_adapter(folder, seed, "average")
    assert kept.lost == 0 and len(kept.others) == 8
    for name, its_change in kept.others.items():
        assert torch.allclose(before[name] + its_change, after[name], atol=1e-6)


@pytest.mark.parametrize(
    "targets, routed",
    [
        ("all-linear", 8),
        (["q_proj", "v_proj"], 4),
        ([*GATED, "o_proj"], 2),
        (r".*\.1\.self_attn\.(k|v)_proj", 2),
    ],
    ids=["all", "qv", "o", "upper"],
)
def test_attention_is_routed(seed, foreign, targets, routed):
    folder, model = foreign(target_modules=targets, alpha_pattern=dict(v_proj=3))
    expert = read_adapter(folder, seed)
    assert torch.allclose(logits(merged(seed, expert)), logits(model), atol=2e-5)
    assert list(expert.account.values()).count("routed") == routed
    assert not expert.others and expert.lost == 0
    names = {linear for path, linear in expert.factors if "self_attn" in path}
    # in all layers or in none, zeros where nothing changes
    assert len(expert.factors) == 6 + 2 * len(names)
    assert {len(a) for a, _ in expert.factors.values()} == {expert.rank}
    again = folder.parent / "again"
    again.mkdir()
    write_adapter(again, expert.factors, expert.scale, "small")
    opened = read_adapter(again, seed)
    for place, pair in expert.factors.items():
        assert all(map(torch.equal, pair, opened.factors[place]))


def test_what_is_no_map_of_attention_is_refused_with_it(seed, foreign):
    folder, _ = foreign(target_modules=["q_proj", "lm_head", "up_proj"])
    with pytest.raises(ValueError, match=r"lm_head.*0 more .*an FFN or attention \(q_proj, k_proj"):
        read_adapter(folder, seed)


@pytest.mark.parametrize(
    "settings, field",
    [
        (dict(use_dora=True), "use_dora.*rescales"),
        (dict(bias="lora_only"), "bias is 'lora_only'"),
        (dict(lora_bias=True), "lora_bias"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save.*whole modules"),
        (dict(init_lora_weights="pissa"), "init_lora_weights.*path_initial_model"),
        (dict(init_lora_weights="olora"), "init_lora_weights"),
        (dict(trainable_token_indices=[3]), "trainable_token_indices"),
        (dict(target_parameters=["lm_head.weight"]), "target_parameters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_plain_lora_is_refused_by_field(seed, foreign, settings, field):
    with pytest.raises(ValueError, match=field):
        read_adapter(foreign(**settings)[0], seed)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(peft_type="IA3"), "must be a LoRA adapter, but is IA3"),
        (dict(some_new_trick=3), "some_new_trick is 3.*not known here"),
        (dict(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
        (dict(alora_invocation_tokens=[1, 2]), "some tokens only"),
        (dict(some_new_trick=None, qalora_group_size=16, megatron_core="megatron.core"), None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_of_the_configuration(seed, foreign, change, message):
    folder, _ = foreign()
    config = json.loads((folder / "adapter_config.json").read_text()) | change
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if message is None:
        assert read_adapter(folder, seed).rank == 4
    else:
        with pytest.raises(ValueError, match=message):
            read_adapter(folder, seed)


KEY = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


def rename(tensors, part, by):
    for name in [name for name in tensors if part in name]:
        tensors[name.replace(part, by)] = tensors.pop(name)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.update({KEY: t[KEY] * torch.nan}), "up_proj.lora_A.weight must be .* finite"),
        (lambda t: t.update({KEY: t[KEY][:3].clone()}), "does not fit.*up_proj has factors"),
        (lambda t: t.pop(KEY), r"up_proj has factors \{'B'"),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}),
            "lm_head.weight must be a factor",
        ),
        (lambda t: rename(t, "layers.0.mlp.up", "layers.7.mlp.up"), "layers.7.*does not exist"),
    ],
    ids=["nan", "rank", "half a pair", "surplus", "no such layer"],
)
def test_tensors_that_do_not_fit_are_named(seed, foreign, change, message):
    folder, _ = foreign()
    edit(folder, "adapter_model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        read_adapter(folder, seed)


def test_other_wrong_adapters(seed, foreign, decoder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        read_adapter(tmp_path / "nowhere", seed)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="adapter_config.json is missing"):
        read_adapter(tmp_path / "empty", seed)
    folder, _ = foreign()
    with pytest.raises(ValueError, match="does not fit small-llama: .* weights"):
        read_adapter(folder, decoder(intermediate_size=40))
    with pytest.raises(ValueError, match="others is 'mean'"):
        read_adapter(folder, seed, "mean")
    with pytest.raises(ValueError, match="changes no FFN.*unless attention is routed"):
        read_adapter(foreign("attention", target_modules=["q_proj"])[0], seed, "ignore")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="Pickles .* are not read"):
        read_adapter(folder, seed)


def named(folder, base):
    "Let an adapter say what it was trained on."
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | dict(base_model_name_or_path=base)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "base, told",
    [
        ("meta/small-llama", None),
        ("unsloth/Small-Llama-unsloth-bnb-4bit", None),
        ("somebody/small_llama.Q8_0.gguf", None),
        ("/home-of-others/models/7b", None),  # a place says nothing
        (r"C:\models\llama", None),
        (None, None),
        (["odd"], None),
        ("meta/large-llama", "there are no weights of that model here to compare"),
        ("meta/large..llama", "there are no weights"),  # which no repository can be called
    ],
)
def test_another_base_model_is_a_warning(seed, foreign, base, told):
    folder, _ = foreign()
    named(folder, base)
    if told is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_adapter(folder, seed).base == one_line(base or "")
    else:
        said = f"was trained on {base}, but the seed is small-llama: its shapes fit, and {told}"
        with pytest.warns(UserWarning, match=said):
            read_adapter(folder, seed)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_base_that_is_here_is_told_by_its_weights_and_not_by_its_name(
    seed, foreign, tmp_path, stored
):
    folder, _ = foreign()
    named(folder, str(tmp_path / "other-name"))
    seed.new_backbone().to(stored).save_pretrained(tmp_path / "other-name")
    assert same_model(str(tmp_path / "other-name"), seed) is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_adapter(folder, seed)
    moved(seed).save_pretrained(tmp_path / "other-name")
    assert same_model(str(tmp_path / "other-name"), seed) is False
    with pytest.warns(UserWarning, match="other-name, but the seed is small-llama: their weights"):
        read_adapter(folder, seed)
    (tmp_path / "other-name" / "model.safetensors").write_bytes(b"half a file")
    assert same_model(str(tmp_path / "other-name"), seed) is None


def test_a_seed_that_is_called_after_its_folder_has_no_name_to_compare(
    seed, foreign, tokenizer, tmp_path
):
    seed.new_backbone().save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    opened = open_seed(str(tmp_path / "mine"))
    folder, _ = foreign()
    named(folder, "meta/large-llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_adapter(folder, opened)


# The hub, which no test reaches


@pytest.fixture
def cache(monkeypatch, tmp_path):
    "A function (folder, repository) that puts a copy of a folder into an empty cache of the hub."
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def put(folder, repository, commit="a" * 40):
        home = tmp_path / "cache" / f"models--{repository.replace('/', '--')}"
        shutil.copytree(folder, home / "snapshots" / commit)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(commit)
        return home / "snapshots" / commit

    return put


def test_an_adapter_of_the_hub_is_read_from_the_cache_without_asking(
    seed, foreign, cache, monkeypatch
):
    folder, _ = foreign()
    place = cache(folder, "somebody/law")
    monkeypatch.setattr(convert, "hub_problem", lambda: 1 / 0)
    for source in ("somebody/law", f"somebody/law@{'a' * 40}", "somebody/law@main"):
        assert find_adapter(source) == place
    there, here = read_adapter("somebody/law", seed), read_adapter(folder, seed)
    for pair, own in zip(there.factors.values(), here.factors.values()):
        assert all(map(torch.equal, pair, own))


def test_a_cached_base_is_compared(seed, foreign, cache, tmp_path):
    folder, _ = foreign()
    named(folder, "meta/other-name")
    seed.new_backbone().save_pretrained(tmp_path / "base")
    cache(tmp_path / "base", "meta/other-name")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_adapter(folder, seed)


def test_no_hub_is_said_at_once_and_what_to_do(cache, monkeypatch):
    said = "there is no folder somebody/law, .*not in the cache.*HF_HUB_OFFLINE.*`hf download some"
    with pytest.raises(ConnectionError, match=said):
        find_adapter("somebody/law")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ConnectionError, match="127.0.0.1:9 cannot be reached"):
        find_adapter("somebody/law@v1")


def test_what_is_no_folder_and_no_id(cache, tmp_path):
    for source in ("law", "a/b/c", "../law", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            find_adapter(source)
    (tmp_path / "file.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file: give the folder"):
        find_adapter(tmp_path / "file.safetensors")


def test_the_hubs_refusal_is_one_error(cache, monkeypatch):
    def refuse(name, **how):
        assert (name, how["revision"]) == ("somebody/law", "v1")
        assert how["allow_patterns"] == ["adapter_config.json", "adapter_model.safetensors"]
        raise OSError("401: Cannot access gated repo")

    monkeypatch.setattr(convert, "hub_problem", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match="401.*gated.*Accept its terms"):
        find_adapter("somebody/law@v1")


def test_image_adapters_of_the_backbone_and_of_a_whole_clip(tiny_seed, foreign, tmp_path):
    backbone, clip = tiny_seed.new_backbone(), copy.deepcopy(tiny_seed.clip)
    ours = list(tiny_seed.ffn.linears)
    one, _ = foreign("backbone", backbone, target_modules=ours)
    two, _ = foreign("clip", clip, target_modules=r"visual\..*\.mlp\.(c_fc|c_proj)")
    for folder in (one, two):
        expert = read_adapter(folder, tiny_seed)
        assert set(expert.account.values()) == {"used"}
        assert len(expert.factors) == 2 * len(tiny_seed.layers)
    both, _ = foreign("both", copy.deepcopy(tiny_seed.clip), target_modules=ours)  # texts, too
    with pytest.raises(ValueError, match="does not exist here|has factors"):
        read_adapter(both, tiny_seed)


# Checkpoints


def test_low_rank_is_the_best_of_its_rank(monkeypatch):
    torch.manual_seed(0)
    change = torch.randn(30, 20, dtype=torch.float64)
    s = torch.linalg.svdvals(change)
    # the exact and the randomised decomposition
    for limit, slack in ((2048, 1 + 1e-6), (0, 1.001)):
        monkeypatch.setattr(convert, "EXACT", limit)
        for rank in (1, 5, 19):
            a, b, error = low_rank(change.float(), rank)
            best = (s[rank:].norm() / s.norm()).item()
            assert a.shape == (rank, 20) and b.shape == (30, rank)
            assert a.dtype == b.dtype == torch.float32
            assert best - 1e-6 <= error <= best * slack + 1e-6
            missed = (change - b.double() @ a.double()).norm() / change.norm()
            assert error == pytest.approx(missed.item(), abs=1e-6)
    state = torch.get_rng_state()
    assert torch.equal(low_rank(change, 3)[0], low_rank(change, 3)[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (20, 20)])
def test_without_a_rank_nothing_is_lost(shape):
    change = torch.randn(shape)
    for rank in (None, 20, 99):
        a, b, error = low_rank(change, rank)
        assert error == 0 and torch.equal(b @ a, change) and a.shape[0] == 20
    assert low_rank(torch.zeros(shape), 3)[2] == 0


@pytest.mark.parametrize("shards", ["5GB", "20kB"])
def test_a_checkpoint_in_a_folder(seed, tmp_path, shards):
    backbone = moved(seed)
    backbone.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (shards == "5GB")
    whole = read_checkpoint(tmp_path, seed, None)
    assert torch.allclose(logits(merged(seed, whole)), logits(backbone), atol=1e-4)
    assert whole.rank == 32
    assert not whole.report().values.any() and whole.report().shape == (2, 3)
    assert sorted(whole.account) == sorted(seed.backbone.state_dict())
    assert sum(what == "used" for what in whole.account.values()) == 6
    few, memory = read_checkpoint(str(tmp_path), seed, 4), read_checkpoint(backbone, seed, 4)
    assert (few.scale, few.rank) == (1, 4)
    assert 0.5 < few.report().values.min() < few.report().values.max() < 1
    for place, (a, b) in few.factors.items():
        assert torch.equal(a, memory.factors[place][0]) and torch.equal(b, memory.factors[place][1])


def test_other_weights_are_refused_ignored_or_averaged(seed):
    backbone = moved(seed, ("mlp", "self_attn", "norm"))
    with pytest.raises(ValueError, match=r"and \d+ more"):
        read_checkpoint(backbone, seed)
    before, after = seed.backbone.state_dict(), backbone.state_dict()
    change = {name: (after[name] - before[name]).double().norm().item() ** 2 for name in before}
    ignored = read_checkpoint(backbone, seed, others="ignore")
    outside = sum(size for name, size in change.items() if ".mlp." not in name)
    assert ignored.lost == pytest.approx(outside / sum(change.values()), rel=1e-6)
    kept = read_checkpoint(backbone, seed, None, "average")
    assert kept.others.keys() == {name for name in before if change[name] and ".mlp." not in name}
    for name, its_change in kept.others.items():
        assert torch.allclose(before[name] + its_change, after[name], atol=1e-6)


def test_rounding_of_a_stored_checkpoint_is_within_a_tolerance(seed, tmp_path):
    moved(seed).to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Choose others="):
        read_checkpoint(tmp_path, seed)
    expert = read_checkpoint(tmp_path, seed, tolerance=0.01)
    assert not expert.others and set(expert.account.values()) == {"used", "as in the seed"}


def test_tied_embeddings(decoder, tmp_path):
    tied = decoder(tie_word_embeddings=True)
    backbone = moved(tied, ("mlp", "embed"))
    backbone.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for source in (backbone, tmp_path):
        expert = read_checkpoint(source, tied, None, "average")
        assert list(expert.others) == ["model.embed_tokens.weight"]
        told = expert.account.get("lm_head.weight") == "tied to model.embed_tokens.weight"
        assert told == (source is backbone)
    other = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    edit(tmp_path, "model.safetensors", other)
    with pytest.raises(ValueError, match="lm_head.weight is tied to model.embed_tokens.weight"):
        read_checkpoint(tmp_path, tied, None, "average")


UP, HEAD = "model.layers.1.mlp.up_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.update({UP: t[UP] * torch.inf}), "up_proj.weight of .* is not finite"),
        (lambda t: t.pop(UP), "lacks the tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
        (lambda t: t.update(score=torch.ones(2)), "has the tensor score, which the seed lacks"),
        (lambda t: t.update({UP: t[UP][:40].clone()}), r"is \(40, 32\) in .* but \(48, 32\)"),
        (lambda t: t.update({HEAD: torch.zeros(264, 32)}), r"lm_head.weight is \(264, 32\)"),
    ],
    ids=["infinite", "FFN missing", "norm missing", "surplus", "FFN shape", "vocabulary"],
)
def test_wrong_checkpoints_name_the_tensor(seed, tmp_path, change, message):
    moved(seed).save_pretrained(tmp_path)
    edit(tmp_path, "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path, seed)


def test_ignored_tensors_are_accounted_for(seed, tmp_path):
    moved(seed).save_pretrained(tmp_path)
    more = {HEAD: torch.zeros(264, 32), "score": torch.ones(2)}
    edit(tmp_path, "model.safetensors", lambda tensors: tensors.update(more))
    account = read_checkpoint(tmp_path, seed, others="ignore").account
    assert account["score"] == "ignored: the seed has no such tensor"
    assert account[HEAD] == "ignored: another shape"


def test_other_wrong_checkpoints(seed, tmp_path):
    with pytest.raises(ValueError, match="the seed's: there is nothing"):
        read_checkpoint(seed.new_backbone(), seed)
    for wrong in (dict(rank=0), dict(others="keep")):
        with pytest.raises(ValueError, match="must be"):
            read_checkpoint(seed.backbone, seed, **wrong)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        read_checkpoint(tmp_path, seed)


def test_a_fine_tuned_clip(tiny_seed, tmp_path):
    ours = [
        f"{path}.{linear}.weight" for path in tiny_seed.layers for linear in tiny_seed.ffn.linears
    ]
    backbone = moved(tiny_seed, ours)
    tiny_seed.save(tmp_path, backbone=backbone)
    for source in (backbone, tmp_path):
        expert = read_checkpoint(source, tiny_seed, None)
        again = merged(tiny_seed, expert)
        for name, weight in backbone.state_dict().items():
            assert torch.allclose(again.state_dict()[name], weight, atol=1e-6)
    biased = moved(tiny_seed, ("mlp",))  # biases of an FFN are no linear map
    with pytest.raises(ValueError, match="c_fc.bias|c_proj.bias"):
        read_checkpoint(biased, tiny_seed)
    words = copy.deepcopy(tiny_seed)  # the text tower moved, which no image tower shows
    for p in (*words.backbone.parameters(), words.clip.token_embedding.weight):
        p.data += 0.1 * torch.randn(p.shape)
    words.save(tmp_path)
    expert = read_checkpoint(tmp_path, tiny_seed, None, "average")
    before, after = tiny_seed.clip.state_dict(), words.clip.state_dict()
    assert {"token_embedding.weight", "visual.conv1.weight"} <= expert.others.keys()
    for name, its_change in expert.others.items():
        assert torch.allclose(before[name] + its_change, after[name], atol=1e-6)


# Out again


def test_write_adapter_needs_no_seed(seed, foreign, tmp_path):
    expert = read_adapter(foreign()[0], seed)
    write_adapter(tmp_path, expert.factors, expert.scale, "whatever")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == sorted(GATED)  # the same bytes in every process
    assert config["base_model_name_or_path"] == "whatever" and config["inference_mode"]


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"lora_alpha": ', '"lora_alpha": NaN, "was": ', "NaN is no finite number"),
        ('"lora_alpha": ', '"lora_alpha": -', "lora_alpha -.*both must be positive"),
        ('"r": ', '"r": 1, "r": ', "the key 'r' occurs twice"),
        ('"use_dora": false', '"use_rings": true', "use_rings is True, and what that changes is"),
        (
            '"fan_in_fan_out": false',
            '"fan_in_fan_out": true',
            "fan_in_fan_out is True, and its mat",
        ),
    ],
)
def test_a_configuration_is_read_as_a_strangers_file(old, new, said, seed, foreign):
    folder, _ = foreign()
    file = folder / "adapter_config.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=said) as caught:
        read_adapter(folder, seed)
    assert str(folder) in str(caught.value)
