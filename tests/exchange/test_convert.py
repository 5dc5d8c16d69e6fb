"""Ways in and out: other people's adapters and checkpoints as experts, unified models as Mixtral and its like, as one
dense expert, as adapters. PEFT and transformers themselves are the reference."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Olmo2Config,
                          PreTrainedTokenizerFast, Qwen2Config, Qwen3Config)

import harmomoe.convert as convert
from harmomoe.adopt import adopt, average_others, example_domain
from harmomoe.bundle import read_bundle
from harmomoe.convert import low_rank, read_adapter, read_checkpoint, write_adapter
from harmomoe.decoder import DecoderSeed
from harmomoe.domains import Domain
from harmomoe.export import dense_expert, save_adapters, to_mixtral
from harmomoe.layer import RouterSettings
from harmomoe.moe import UnifiedModel
from harmomoe.routing import layer_means
from harmomoe.texts import text_dataset
from harmomoe.unify import Config
from harmomoe.weights import open_seed
from helpers import stamps

GATED = ["gate_proj", "up_proj", "down_proj"]
FAMILIES = dict(llama=LlamaConfig, mistral=MistralConfig, qwen2=Qwen2Config, qwen3=Qwen3Config, olmo2=Olmo2Config,
                gemma2=Gemma2Config)
TOKENS = torch.randint(3, 250, (2, 14), generator=torch.Generator().manual_seed(0))


def logits(tower):
    with torch.no_grad():
        return tower(TOKENS).logits


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(names)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def decoder(tokenizer):
    "A function (family, settings of its configuration) -> a seed of two layers with random weights."
    def build(family="llama", **settings):
        size = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=.2,
                    pad_token_id=0, bos_token_id=1, eos_token_id=2)
        if family in ("qwen3", "gemma2"):
            size["head_dim"] = 8
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](**(size | settings)))
        for name, p in model.named_parameters():  # what starts as ones and zeros
            if p.ndim == 1:
                p.data += .1 * torch.randn(p.shape)
        return DecoderSeed(model, tokenizer, f"small-{family}")
    return build


@pytest.fixture(scope="module")
def seed(decoder):
    return decoder()


@pytest.fixture
def foreign(seed, tmp_path):
    "A function (settings of PEFT) -> a folder that PEFT wrote, and the adapted model."
    def build(name="adapter", base=None, rng=1, target_modules=GATED, **settings):
        torch.manual_seed(rng)
        chosen = dict(r=4, lora_alpha=8, init_lora_weights=False) | settings
        model = get_peft_model(base or seed.new_tower(), LoraConfig(target_modules=target_modules, **chosen)).eval()
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
        return tmp_path / name, model
    return build


@torch.no_grad()
def merged(seed, expert):
    "The seed's tower with the expert's change, added in float64."
    tower = seed.new_tower()
    for (path, linear), (a, b) in expert.factors.items():
        weight = getattr(tower.get_submodule(path), linear).weight
        weight.copy_(weight.double() + expert.scale * b.double() @ a.double())
    return tower


@torch.no_grad()
def moved(seed, parts=("mlp",), rng=1, size=.05):
    "A tower of the seed whose weights moved wherever one of these is in the name."
    tower, generator = seed.new_tower(), torch.Generator().manual_seed(rng)
    for name, p in tower.named_parameters():
        if any(part in name for part in parts):
            p += size * torch.randn(p.shape, generator=generator)
    return tower


def edit(folder, name, change):
    "Rewrite the tensors of a safetensors file."
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


# ---- adapters


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_ffn_adapter_is_used_as_it_is(seed, foreign, use_rslora):
    folder, model = foreign(use_rslora=use_rslora)
    expert, tensors = read_adapter(folder, seed), load_file(folder / "adapter_model.safetensors")
    assert expert.rank == 4 and expert.scale == (4 if use_rslora else 2) and not expert.others and expert.lost == 0
    assert len(expert.account) == 6 and set(expert.account.values()) == {"used"}
    for (path, linear), (a, b) in expert.factors.items():
        assert torch.equal(a, tensors[f"base_model.model.{path}.{linear}.lora_A.weight"])
        assert torch.equal(b, tensors[f"base_model.model.{path}.{linear}.lora_B.weight"])
    assert torch.allclose(logits(merged(seed, expert)), logits(model), atol=1e-5)
    assert not expert.report().values.any()


@pytest.mark.parametrize("settings", [
    dict(rank_pattern={"layers.0.mlp.up_proj": 7, "down_proj": 2}, alpha_pattern={"layers.1.mlp.down_proj": 3}),
    dict(rank_pattern={"up_proj": 6}, use_rslora=True),
    dict(layers_to_transform=[1]),
    dict(target_modules=["up_proj"]),
    dict(target_modules=r".*\.0\.mlp\.(gate|down)_proj"),
    dict(init_lora_weights="orthogonal", task_type="CAUSAL_LM", lora_dropout=.1),
], ids=lambda settings: "-".join(settings))
def test_patterns_and_parts_give_what_peft_gives(seed, foreign, settings):
    folder, model = foreign(**settings)
    expert = read_adapter(folder, seed)
    assert len(expert.factors) == 6 and {len(a) for a, _ in expert.factors.values()} == {expert.rank}
    assert torch.allclose(logits(merged(seed, expert)), logits(model), atol=2e-5)
    if "init_lora_weights" not in settings:
        assert (logits(model) - logits(seed.tower)).abs().max() > .1


def test_attention_is_refused_ignored_or_averaged(seed, foreign):
    folder, model = foreign(target_modules="all-linear")
    with pytest.raises(ValueError, match="q_proj|k_proj|v_proj|o_proj.*and 7 more.*% of the squared norm.*average"):
        read_adapter(folder, seed)
    before, after = seed.tower.state_dict(), copy.deepcopy(model).merge_and_unload().state_dict()
    change = {name: (after[name] - before[name]).double().norm().item() ** 2 for name in before}
    outside = sum(size for name, size in change.items() if "self_attn" in name)
    ignored = read_adapter(folder, seed, "ignore")
    assert ignored.lost == pytest.approx(outside / sum(change.values()), rel=1e-4) and not ignored.others
    assert sorted(set(ignored.account.values())) == ["ignored", "used"] and len(ignored.account) == 14
    kept = read_adapter(folder, seed, "average")
    assert kept.lost == 0 and len(kept.others) == 8
    assert seed.identity  # whose digest is kept from now on, and must not pass to the copy
    changed, (alone,) = average_others(seed, [kept])
    assert torch.allclose(logits(merged(changed, alone)), logits(model), atol=1e-4)
    assert changed.identity["weights"] != seed.identity["weights"] and not alone.others
    nothing = read_adapter(foreign("plain")[0], seed, "average")  # it counts as a client that changed nothing
    halved = average_others(seed, [kept, nothing])[0].tower.state_dict()
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.allclose(halved[name], (before[name] + after[name]) / 2, atol=1e-6)
    assert torch.equal(halved["model.layers.1.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("settings, field", [
    (dict(use_dora=True), "use_dora.*rescales"),
    (dict(bias="lora_only"), "bias is 'lora_only'"),
    (dict(lora_bias=True), "lora_bias"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save.*whole modules"),
    (dict(init_lora_weights="pissa"), "init_lora_weights.*path_initial_model"),
    (dict(init_lora_weights="olora"), "init_lora_weights"),
    (dict(trainable_token_indices=[3]), "trainable_token_indices"),
    (dict(target_parameters=["lm_head.weight"]), "target_parameters"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_is_no_plain_lora_is_refused_by_field(seed, foreign, settings, field):
    with pytest.raises(ValueError, match=field):
        read_adapter(foreign(**settings)[0], seed)


@pytest.mark.parametrize("change, message", [
    (dict(peft_type="IA3"), "must be a LoRA adapter, but is IA3"),
    (dict(some_new_trick=3), "some_new_trick is 3.*not known here"),
    (dict(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    (dict(alora_invocation_tokens=[1, 2]), "some tokens only"),
    (dict(some_new_trick=None, qalora_group_size=16, megatron_core="megatron.core"), None),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
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


@pytest.mark.parametrize("change, message", [
    (lambda t: t.update({KEY: t[KEY] * torch.nan}), "up_proj.lora_A.weight must be .* finite"),
    (lambda t: t.update({KEY: t[KEY][:3].clone()}), "does not fit.*up_proj has factors"),
    (lambda t: t.pop(KEY), r"up_proj has factors \{'B'"),
    (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight must be a factor"),
    (lambda t: t.update({k.replace("layers.0", "layers.7"): t.pop(k) for k in list(t) if "layers.0.mlp.up" in k}),
     "layers.7.mlp.up_proj.*does not exist"),
], ids=["nan", "rank", "half a pair", "surplus", "no such layer"])
def test_tensors_that_do_not_fit_are_named(seed, foreign, change, message):
    folder, _ = foreign()
    edit(folder, "adapter_model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        read_adapter(folder, seed)


def test_other_wrong_adapters(seed, foreign, decoder, tmp_path):
    with pytest.raises(FileNotFoundError, match="adapter_config.json is missing"):
        read_adapter(tmp_path / "nowhere", seed)
    folder, _ = foreign()
    with pytest.raises(ValueError, match="does not fit small-llama: .* weights"):
        read_adapter(folder, decoder(intermediate_size=40))
    with pytest.raises(ValueError, match="others is 'mean'"):
        read_adapter(folder, seed, "mean")
    with pytest.raises(ValueError, match="changes no FFN"):
        read_adapter(foreign("attention", target_modules=["q_proj"])[0], seed, "ignore")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="Pickles .* are not read"):
        read_adapter(folder, seed)


def test_another_base_model_is_a_warning(seed, foreign):
    folder, _ = foreign()
    config = json.loads((folder / "adapter_config.json").read_text())
    for base, warns in (("meta/small-llama", False), ("meta/large-llama", True)):
        (folder / "adapter_config.json").write_text(json.dumps(config | dict(base_model_name_or_path=base)))
        if warns:
            with pytest.warns(UserWarning, match="was trained on meta/large-llama, but the seed is small-llama"):
                read_adapter(folder, seed)
        else:
            read_adapter(folder, seed)


def test_image_adapters_of_the_tower_and_of_a_whole_clip(tiny_seed, foreign, tmp_path):
    tower, clip = tiny_seed.new_tower(), copy.deepcopy(tiny_seed.clip)
    ours = list(tiny_seed.ffn.linears)
    one, _ = foreign("tower", tower, target_modules=ours)
    two, _ = foreign("clip", clip, target_modules=r"visual\..*\.mlp\.(c_fc|c_proj)")
    for folder in (one, two):
        expert = read_adapter(folder, tiny_seed)
        assert set(expert.account.values()) == {"used"} and len(expert.factors) == 2 * len(tiny_seed.layers)
    both, _ = foreign("both", copy.deepcopy(tiny_seed.clip), target_modules=ours)  # the text tower, too
    with pytest.raises(ValueError, match="does not exist here|has factors"):
        read_adapter(both, tiny_seed)


# ---- checkpoints


def test_low_rank_is_the_best_of_its_rank(monkeypatch):
    torch.manual_seed(0)
    change = torch.randn(30, 20, dtype=torch.float64)
    s = torch.linalg.svdvals(change)
    for limit, slack in ((2048, 1 + 1e-6), (0, 1.001)):  # the exact and the randomised decomposition
        monkeypatch.setattr(convert, "EXACT", limit)
        for rank in (1, 5, 19):
            a, b, error = low_rank(change.float(), rank)
            best = (s[rank:].norm() / s.norm()).item()
            assert a.shape == (rank, 20) and b.shape == (30, rank) and a.dtype == b.dtype == torch.float32
            assert best - 1e-6 <= error <= best * slack + 1e-6
            assert error == pytest.approx(((change - b.double() @ a.double()).norm() / change.norm()).item(), abs=1e-6)
    state = torch.get_rng_state()
    assert torch.equal(low_rank(change, 3)[0], low_rank(change, 3)[0]) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (20, 20)])
def test_without_a_rank_nothing_is_lost(shape):
    change = torch.randn(shape)
    for rank in (None, 20, 99):
        a, b, error = low_rank(change, rank)
        assert error == 0 and torch.equal(b @ a, change) and a.shape[0] == 20
    assert low_rank(torch.zeros(shape), 3)[2] == 0


@pytest.mark.parametrize("shards", ["5GB", "20kB"])
def test_a_checkpoint_in_a_folder(seed, tmp_path, shards):
    tower = moved(seed)
    tower.save_pretrained(tmp_path, max_shard_size=shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if shards == "5GB" else 3
    whole = read_checkpoint(tmp_path, seed, None)
    assert torch.allclose(logits(merged(seed, whole)), logits(tower), atol=1e-4) and whole.rank == 32
    assert not whole.report().values.any() and whole.report().shape == (2, 3)
    assert sorted(whole.account) == sorted(seed.tower.state_dict())
    assert sum(what == "used" for what in whole.account.values()) == 6
    few, memory = read_checkpoint(str(tmp_path), seed, 4), read_checkpoint(tower, seed, 4)
    assert few.scale == 1 and few.rank == 4 and .5 < few.report().values.min() < few.report().values.max() < 1
    for place, (a, b) in few.factors.items():
        assert torch.equal(a, memory.factors[place][0]) and torch.equal(b, memory.factors[place][1])


def test_other_weights_are_refused_ignored_or_averaged(seed):
    tower = moved(seed, ("mlp", "self_attn", "norm"))
    with pytest.raises(ValueError, match=r"and \d+ more"):
        read_checkpoint(tower, seed)
    before, after = seed.tower.state_dict(), tower.state_dict()
    change = {name: (after[name] - before[name]).double().norm().item() ** 2 for name in before}
    ignored = read_checkpoint(tower, seed, others="ignore")
    outside = sum(size for name, size in change.items() if ".mlp." not in name)
    assert ignored.lost == pytest.approx(outside / sum(change.values()), rel=1e-6)
    kept = read_checkpoint(tower, seed, None, "average")
    changed, (alone,) = average_others(seed, [kept])
    assert torch.allclose(logits(merged(changed, alone)), logits(tower), atol=1e-4)
    for name, weight in changed.tower.state_dict().items():
        assert torch.allclose(weight, before[name] if ".mlp." in name else after[name], atol=1e-6)


def test_rounding_of_a_stored_checkpoint_is_within_a_tolerance(seed, tmp_path):
    moved(seed).to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Choose others="):
        read_checkpoint(tmp_path, seed)
    expert = read_checkpoint(tmp_path, seed, tolerance=.01)
    assert not expert.others and set(expert.account.values()) == {"used", "as in the seed"}


def test_tied_embeddings(decoder, tmp_path):
    tied = decoder(tie_word_embeddings=True)
    tower = moved(tied, ("mlp", "embed"))
    tower.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for source in (tower, tmp_path):
        expert = read_checkpoint(source, tied, None, "average")
        assert list(expert.others) == ["model.embed_tokens.weight"]
        assert (expert.account.get("lm_head.weight") == "tied to model.embed_tokens.weight") == (source is tower)
        changed, (alone,) = average_others(tied, [expert])  # added once, not twice
        assert torch.allclose(logits(merged(changed, alone)), logits(tower), atol=1e-4)
    edit(tmp_path, "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight is tied to model.embed_tokens.weight"):
        read_checkpoint(tmp_path, tied, None, "average")


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("change, message", [
    (lambda t: t.update({UP: t[UP] * torch.inf}), "up_proj.weight of .* is not finite"),
    (lambda t: t.pop(UP), "lacks the tensor model.layers.1.mlp.up_proj.weight"),
    (lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
    (lambda t: t.update(score=torch.ones(2)), "has the tensor score, which the seed lacks"),
    (lambda t: t.update({UP: t[UP][:40].clone()}), r"up_proj.weight is \(40, 32\) in .* but \(48, 32\)"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(264, 32)}), r"lm_head.weight is \(264, 32\)"),
], ids=["infinite", "FFN missing", "norm missing", "surplus", "FFN shape", "vocabulary"])
def test_wrong_checkpoints_name_the_tensor(seed, tmp_path, change, message):
    moved(seed).save_pretrained(tmp_path)
    edit(tmp_path, "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path, seed)


def test_ignored_tensors_are_accounted_for(seed, tmp_path):
    moved(seed).save_pretrained(tmp_path)
    more = {"lm_head.weight": torch.zeros(264, 32), "score": torch.ones(2)}
    edit(tmp_path, "model.safetensors", lambda tensors: tensors.update(more))
    account = read_checkpoint(tmp_path, seed, others="ignore").account
    assert account["score"] == "ignored: the seed has no such tensor"
    assert account["lm_head.weight"] == "ignored: another shape"


def test_other_wrong_checkpoints(seed, tmp_path):
    with pytest.raises(ValueError, match="the seed's: there is nothing"):
        read_checkpoint(seed.new_tower(), seed)
    for wrong in (dict(rank=0), dict(others="keep")):
        with pytest.raises(ValueError, match="must be"):
            read_checkpoint(seed.tower, seed, **wrong)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        read_checkpoint(tmp_path, seed)


def test_a_fine_tuned_clip(tiny_seed, tmp_path):
    ours = [f"{path}.{linear}.weight" for path in tiny_seed.layers for linear in tiny_seed.ffn.linears]
    tower = moved(tiny_seed, ours)
    tiny_seed.save(tmp_path, tower=tower)
    for source in (tower, tmp_path):
        expert = read_checkpoint(source, tiny_seed, None)
        again = merged(tiny_seed, expert)
        for name, weight in tower.state_dict().items():
            assert torch.allclose(again.state_dict()[name], weight, atol=1e-6)
    biased = moved(tiny_seed, ("mlp",))  # biases of an FFN are no linear map
    with pytest.raises(ValueError, match="c_fc.bias|c_proj.bias"):
        read_checkpoint(biased, tiny_seed)
    words = copy.deepcopy(tiny_seed)  # the text tower moved, which no image tower shows
    for p in (*words.tower.parameters(), words.clip.token_embedding.weight):
        p.data += .1 * torch.randn(p.shape)
    words.save(tmp_path)
    expert = read_checkpoint(tmp_path, tiny_seed, None, "average")
    assert "token_embedding.weight" in expert.others and "visual.conv1.weight" in expert.others
    changed, (alone,) = average_others(tiny_seed, [expert])
    assert torch.allclose(changed.clip.token_embedding.weight, words.clip.token_embedding.weight, atol=1e-6)
    assert torch.allclose(changed.clip.visual.conv1.weight, words.clip.visual.conv1.weight, atol=1e-6)


# ---- bundles


def test_a_clients_own_expert_is_adopted_as_it_was(tiny, tmp_path):
    own = tiny.bundles[0]
    expert = read_adapter(own.folder / "adapter", tiny.seed)
    folder = adopt(expert, tiny.a, tiny.seed, tiny.pool, tiny.embeddings, tiny.settings, tmp_path / "a")
    bundle = read_bundle(folder, tiny.seed, own.proxies.pool_fingerprint)
    assert (bundle.client, bundle.scale) == (own.client, own.scale)
    assert bundle.proxies.ids.tolist() == own.proxies.ids.tolist()
    for place, pair in own.factors.items():
        assert all(torch.equal(*both) for both in zip(pair, bundle.factors[place]))
    assert bundle.manifest["facts"]["private_samples"] == len(tiny.a.train)
    assert bundle.manifest["inputs"]["settings"]["expert"] == "trained elsewhere"
    before = stamps(tmp_path)
    adopt(expert, tiny.a, tiny.seed, tiny.pool, tiny.embeddings, tiny.settings, tmp_path / "a")
    assert stamps(tmp_path) == before and len(before) >= 4


@pytest.mark.parametrize("form", ["mean", "logistic", "moments"])
def test_a_name_alone_gives_random_vectors_and_proxies(tiny, tmp_path, form):
    settings = replace(tiny.settings, router=RouterSettings(initial=form))
    expert = read_adapter(tiny.bundles[0].folder / "adapter", tiny.seed)
    folders = [adopt(expert, name, tiny.seed, tiny.pool, tiny.embeddings, settings, tmp_path / where)
               for name, where in (("cats", "1"), ("cats", "2"), ("dogs", "3"))]
    made = [read_bundle(folder, tiny.seed) for folder in folders]
    assert made[0].routing.form == form and not made[0].routing.biases.any()
    assert len(made[0].proxies) == settings.proxies
    assert torch.equal(made[0].routing.vectors, made[1].routing.vectors)
    assert made[0].proxies.ids.tolist() == made[1].proxies.ids.tolist() != made[2].proxies.ids.tolist()
    assert not torch.equal(made[0].routing.vectors, made[2].routing.vectors)


@pytest.fixture(scope="module")
def text_pool(tokenizer):
    rows = [dict(instruction=f"Name {n} things.", output="One.", input="") for n in range(40)]
    samples = text_dataset(rows, "pool")
    return Domain("pool", samples, samples.select([]), samples.select([]))


def test_example_prompts_stand_for_data(seed, foreign, text_pool, tmp_path):
    config = Config(candidates=30, proxies=6, public_samples=40, router=RouterSettings(initial="logistic"))
    embeddings = seed.embed(text_pool.train).numpy()
    expert = read_adapter(foreign()[0], seed)
    domain = example_domain("law", [f"Is clause {n} void?" for n in range(12)])
    assert len(domain.train) == 12 and not len(domain.test) and domain.train[0]["answer"] == ""
    bundle = read_bundle(adopt(expert, domain, seed, text_pool, embeddings, config, tmp_path / "law"), seed)
    assert bundle.routing.form == "logistic" and bundle.routing.biases.all() and len(bundle.proxies) == 6
    with pytest.raises(ValueError, match="at least 10 private"):
        adopt(expert, example_domain("few", ["Is it?"]), seed, text_pool, embeddings, config, tmp_path / "few")
    with pytest.raises(ValueError, match="row 1: the prompt is empty or ends in a blank"):
        example_domain("law", ["Is it?", "Is it "])


def test_changes_besides_ffns_are_averaged_before_a_bundle(seed, text_pool, tmp_path):
    config, embeddings = Config(candidates=30, proxies=6), seed.embed(text_pool.train).numpy()
    expert = read_checkpoint(moved(seed, ("mlp", "attn")), seed, 4, "average")
    with pytest.raises(ValueError, match="average_others"):
        adopt(expert, "law", seed, text_pool, embeddings, config, tmp_path / "law")
    assert not (tmp_path / "law").exists()
    changed, (expert,) = average_others(seed, [expert])
    folder = adopt(expert, "law", changed, text_pool, embeddings, config, tmp_path / "law")
    assert read_bundle(folder, changed).client == "law"
    with pytest.raises(ValueError, match="another seed"):
        read_bundle(folder, seed)


# ---- out


@pytest.fixture(scope="module")
def unified(decoder):
    "A function (family, configuration, settings of the router) -> a unified model of three random experts."
    def build(family="llama", configuration={}, **router):
        seed = decoder(family, **configuration)
        settings = RouterSettings(**(dict(blend=0., learn_blend=False) | router))
        model = UnifiedModel(seed, ["seed", "law", "medicine"], [0, 4, 2], [0., 2., .75], settings)
        with torch.no_grad():
            for layer in model.layers:
                for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
                    p.normal_(std=.3)
                if layer.router.biases is not None:
                    layer.router.biases.normal_()
        return model
    return build


def test_adapters_again(unified, tmp_path):
    model = unified(top_k=2)
    folders = save_adapters(model, tmp_path)
    assert list(folders) == ["law", "medicine"] and sorted(p.name for p in tmp_path.iterdir()) == ["law", "medicine"]
    for name, folder in folders.items():
        assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        alone = PeftModel.from_pretrained(model.seed.new_tower(), folder)
        with model.only(name):
            assert torch.allclose(logits(alone), logits(model.tower), atol=1e-5)
        expert = read_adapter(folder, model.seed)  # and in again
        index = model.experts.index(name)
        assert expert.rank == model.ranks[index] and expert.scale == pytest.approx(model.scales[index])
        theirs, layer = expert.factors[model.seed.layers[1], "up_proj"][0], model.layers[1]
        assert torch.equal(theirs, layer.a["up_proj"][layer.owner == index])
    assert list(save_adapters(model, tmp_path, "law")) == ["law"]
    with pytest.raises(ValueError, match="seed's own FFN"):
        save_adapters(model, tmp_path / "no", "seed")
    with pytest.raises(ValueError, match="no expert 'cooking'; this model has seed, law, medicine"):
        save_adapters(model, tmp_path / "no", "law", "cooking")
    assert not (tmp_path / "no").exists()


def test_images_go_out_too(tiny, unite_with, tmp_path):
    model = unite_with()
    folders = save_adapters(model, tmp_path)
    batch = next(iter(tiny.seed.batches(tiny.a.test, batch_size=8)))
    for name in model.experts:
        (tmp_path / "dense").mkdir()
        tiny.seed.save(tmp_path / "dense", tower=dense_expert(model, name))
        dense = open_seed(str(tmp_path / "dense"))
        towers = [dense.tower]
        if name != "seed":
            towers.append(PeftModel.from_pretrained(tiny.seed.new_tower(), folders[name]))
        with torch.no_grad(), model.only(name):
            expected = tiny.seed.hidden(model.tower, batch)
            for tower in towers:
                assert torch.allclose(tiny.seed.hidden(tower, batch), expected, atol=1e-5)
        shutil.rmtree(tmp_path / "dense")
    with pytest.raises(ValueError, match="VisionTransformer"):
        to_mixtral(model)


def test_one_dense_language_model(unified, tmp_path):
    model = unified()
    for name in model.experts:
        model.seed.save(tmp_path, tower=dense_expert(model, name))
        again = open_seed(str(tmp_path))
        with model.only(name):
            assert torch.allclose(logits(again.tower), logits(model.tower), atol=1e-5)
    assert type(again.tower) is type(model.seed.tower) and not again.tower.base_model._forward_pre_hooks
    with pytest.raises(ValueError, match="no expert"):
        dense_expert(model, "cooking")


WEIGHTS = [dict(top_k=1), dict(top_k=1, renormalise=True), dict(top_k=2), dict(top_k=2, renormalise=True),
           dict(top_k=3)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: "-".join(f"{k}{int(v)}" for k, v in w.items()))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
def test_the_export_is_exact(unified, family, weights, tmp_path):
    model = unified(family, **weights)
    exported, changed = to_mixtral(model)
    to_one = weights["top_k"] == 3 or "renormalise" in weights
    kinds = dict(qwen2="Qwen2Moe", qwen3="Qwen3Moe", olmo2="FlexOlmo")
    assert type(exported).__name__ == kinds.get(family, "Mixtral" if to_one else "Qwen2Moe") + "ForCausalLM"
    assert changed == {} and (logits(exported) - logits(model.tower)).abs().max() < 2e-5
    exported.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and type(again) is type(exported)
    assert torch.equal(logits(again), logits(exported))
    twice, exact = again.double(), model.tower.double()
    twice.set_experts_implementation("eager")  # the faster ones know no float64
    assert (logits(twice) - logits(exact)).abs().max() < 2e-6  # their router's softmax is in float32


def test_the_files_have_one_tensor_for_each_experts_map(unified, tmp_path):
    to_mixtral(unified(renormalise=True))[0].save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {f"model.layers.1.block_sparse_moe.experts.{e}.w{w}.weight" for e in range(3) for w in (1, 2, 3)} <= names


def test_generation_is_the_same(unified):
    model = unified(top_k=2, context="prefix")
    exported, _ = to_mixtral(model)
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    for how in (dict(), dict(num_beams=2)):
        settings = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, **how)
        assert torch.equal(model.tower.generate(TOKENS, **settings), exported.generate(TOKENS, **settings))


LLAMA3 = dict(rope_type="llama3", rope_theta=10000., factor=8., low_freq_factor=1., high_freq_factor=4.,
              original_max_position_embeddings=32)


@pytest.mark.parametrize("weights", [dict(top_k=2), dict(top_k=3)], ids=["probabilities", "sum 1"])
@pytest.mark.parametrize("family, configuration", [
    ("llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-2)),
    ("llama", dict(rope_parameters=LLAMA3, head_dim=16)),
    ("mistral", dict(head_dim=16, sliding_window=4)),
    ("mistral", dict(sliding_window=None)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    ("qwen3", dict(attention_bias=True)),
    ("qwen3", dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    ("olmo2", dict(num_key_value_heads=4)),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_settings_of_the_seed_are_kept(unified, family, configuration, weights):
    model = unified(family, configuration, **weights)
    exported, _ = to_mixtral(model)
    assert (logits(exported) - logits(model.tower)).abs().max() < 5e-5


@pytest.mark.parametrize("family, configuration, message", [
    ("gemma2", {}, "the attention and norms of gemma2"),
    ("llama", dict(mlp_bias=True), "FFNs of small-llama have biases"),
    ("llama", dict(attention_bias=True), "self_attn.q_proj.bias has no counterpart"),
    ("qwen3", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1), "no attention windows"),
])
def test_what_no_class_can_hold_is_refused(unified, family, configuration, message):
    with pytest.raises(ValueError, match=message):
        to_mixtral(unified(family, configuration, renormalise=True))


def test_an_unknown_setting_is_found_by_its_effect(unified):
    model = unified(renormalise=True)
    for layer in model.tower.model.layers:
        layer.self_attn.scaling *= 3
    with pytest.raises(ValueError, match="some setting of small-llama is not known"):
        to_mixtral(model)


def test_in_bfloat16(unified, tmp_path):
    model = unified(renormalise=True, top_k=2)
    wide = logits(model.tower)
    for module in (model.seed.model, *(layer.ffn for layer in model.layers), model.tower.model.embed_tokens,
                   model.tower.lm_head, model.tower.model.norm):
        module.to(torch.bfloat16)
    for layer in model.tower.model.layers:
        for part in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
            part.to(torch.bfloat16)
    exported, _ = to_mixtral(model)
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}
    assert (logits(exported).float() - wide).norm() < .1 * wide.norm()


# ---- without context


def plain_texts(text):
    rows = [dict(prompt=text.replace("{}", str(n)), answer="", choices=[], label=0) for n in range(30)]
    return text_dataset(rows, "samples")


def test_context_and_biases_are_refused_or_dropped(unified):
    samples = plain_texts("What is {} less seven?")
    quiz = [dict(question=f"Is {n} even?", choices=["yes", "no"], answer="AB"[n % 2]) for n in range(12)]
    test = text_dataset(quiz, "quiz")
    for router, message in ((dict(blend=.5), "by context .lambda 0.5."), (dict(initial="logistic"), "with biases"),
                            (dict(initial="logistic", blend=.3), "by context")):
        model = unified(top_k=2, **router)
        with pytest.raises(ValueError, match=message):
            to_mixtral(model)
        before, routers = logits(model.tower), [layer.router for layer in model.layers]
        if "initial" in router:
            with pytest.raises(ValueError, match="give samples"):
                to_mixtral(model, drop_context=True)
        exported, changed = to_mixtral(model, True, samples, test)
        assert changed["blend"] == pytest.approx([router.get("blend", 0)] * 2)
        assert ("constant" in changed) == ("initial" in router)
        assert changed["accuracy"]["before"].n == changed["accuracy"]["after"].n == 12
        assert torch.equal(logits(model.tower), before) and routers == [layer.router for layer in model.layers]
        for layer in model.layers:  # the model that was exported, without its context and with whole vectors
            layer.router.blend.data.zero_()
            if layer.router.biases is not None:
                layer.router.biases.data.zero_()
        for layer, block in zip(model.layers, exported.model.layers):
            if "constant" in changed:
                assert not torch.allclose(block.mlp.gate.weight, layer.router.vectors)
            layer.router.vectors.data.copy_(block.mlp.gate.weight)
        assert torch.allclose(logits(model.tower), logits(exported), atol=1e-4)


def test_biases_become_part_of_the_vectors(unified):
    model = unified(initial="logistic")
    samples = plain_texts("{} times {}?")
    exported, changed = to_mixtral(model, True, samples)
    assert max(changed["constant"]) < .1
    for layer, block, z in zip(model.layers, exported.model.layers, layer_means(model.seed, model.tower, samples)):
        wanted = z @ layer.router.vectors.T + layer.router.biases
        assert torch.allclose(z @ block.mlp.gate.weight.T, wanted, atol=.3)


def test_moments_keep_the_half_that_meets_the_token(unified):
    model = unified(initial="moments", top_k=3)
    for layer in model.layers:
        layer.router.biases.data.zero_()
    exported, changed = to_mixtral(model)  # with lambda 0 the spread counts for nothing
    assert changed == {} and torch.allclose(logits(exported), logits(model.tower), atol=2e-5)


def test_zero_biases_are_none(unified):
    model = unified(initial="logistic", renormalise=True)
    for layer in model.layers:
        layer.router.biases.data.zero_()
    assert to_mixtral(model)[1] == {}


def test_write_adapter_needs_no_seed(seed, foreign, tmp_path):
    expert = read_adapter(foreign()[0], seed)
    write_adapter(tmp_path, expert.factors, expert.scale, "whatever")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 8, sorted(GATED))
    assert config["base_model_name_or_path"] == "whatever" and config["inference_mode"]
