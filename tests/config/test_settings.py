"""Settings: the paper's and the authors', and no wrong one passes, whether it is a slip or bad
arithmetic."""

import re
from dataclasses import asdict, fields, is_dataclass, replace

import numpy as np
import pytest
import torch
import yaml
from odd_values import MEANT, TYPED, annotations, is_numeric, odd_values

from harmomoe.base.artefacts import digest
from harmomoe.base.schema import parse
from harmomoe.config.settings import (
    Config,
    ExpertSettings,
    FinetuneSettings,
    GateSettings,
    ProxySettings,
    RelevanceSettings,
    RoutingSettings,
    changed,
    check_settings,
    guaranteed,
    preset,
    read_settings,
)
from harmomoe.models.training import Training
from harmomoe.moe.router import RouterSettings, rules_of

PRESETS = ("paper", "gated", "text", "embedded", "many", "ratios", "text-paper", "embedded-text")


def nested(name, value):
    "`a.b` and a value as {a: {b: value}}."
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def brackets(depth):
    "A list in a list, and so on."
    found = []
    for _ in range(depth):
        found = [found]
    return found


# ---- values


WRONG = [
    ({"relevance.method": "svm"}, "relevance.method is 'svm'.*'probe', 'finetune' or 'lda'"),
    ({"proxies.selection": "best"}, "proxies.selection is 'best'.*'dpp', 'similarity' or 'rand"),
    ({"proxies.fill": "most"}, "proxies.fill is 'most'.*'dpp', 'relevance' or None"),
    (
        {"proxies.candidates": 10, "proxies.number": 11},
        "proxies.number .m = 11.*cannot exceed candidates.*n = 10",
    ),
    (
        {"expert.proxies": False, "expert.private": False},
        "expert.proxies and private are both off: experts have nothing to train on",
    ),
    ({"expert.optimizer": "adam"}, "expert.optimizer is 'adam'.*'sgd' or 'adamw'"),
    ({"finetune.epochs": -1}, "finetune.epochs is -1, but must be a whole number from 0 to 100,0"),
    (
        {"finetune.learning_rate": float("nan")},
        "finetune.learning_rate is nan, but must be a number above 0 and at most",
    ),
    ({"expert.momentum": 1}, "expert.momentum is 1, but must be a number at least 0 and below 1"),
    ({"router.form": "zero"}, "router.form is 'zero'.*'mean', .*'evidence' or 'random'"),
    ({"router.context": "page"}, "router.context is 'page'.*'sequence', 'prefix' or 'prompt'"),
    ({"router.lam": 1.5}, "router.lam is 1.5, but must be a number from 0 to 1"),
    ({"router.top_k": 0}, "router.top_k is 0, but must be a whole number from 1 to 4,096"),
    (
        {"router.form": "moments", "router.context": "prefix"},
        "router.form is 'moments', which needs the whole sequence",
    ),
]
WRONG += [({"expert.dropout": p}, f"expert.dropout is {p}") for p in (-0.1, 1.0, 1.5, float("nan"))]


@pytest.mark.parametrize("wrong, said", WRONG, ids=lambda given: str(given)[:60])
def test_values_are_checked_before_any_work(wrong, said):
    for name in PRESETS:
        with pytest.raises(ValueError, match=f"settings: .*{said}"):
            changed(preset(name), wrong)


def test_what_is_checked_by_name_is_checked_in_python_too():
    for make in (
        lambda: RelevanceSettings("svm"),
        lambda: ProxySettings(10, 11),
        lambda: ExpertSettings(proxies=False, private=False),
        lambda: ExpertSettings(epochs=-1),
        lambda: RoutingSettings(0),
        lambda: RouterSettings(lam=2.0),
    ):
        with pytest.raises(ValueError):
            make()


def test_settings_are_never_changed_in_place():
    config = Config()
    for settings in (config, config.expert, config.router, config.finetune):
        with pytest.raises(AttributeError):
            setattr(settings, fields(settings)[0].name, 1)


def test_clients_send_the_routers_form_and_those_that_are_named_in_one_order():
    router = RouterSettings(form="moments")
    for forms, sent in (
        ("", ("moments",)),
        ("moments", ("moments",)),
        ("mean", ("mean", "moments")),
        ("moments+logistic+mean", ("mean", "logistic", "moments")),
    ):
        assert RoutingSettings(forms=forms).sent(router) == sent
    assert RoutingSettings().sent(RouterSettings(form="random")) == ("mean",)
    assert changed(Config(), read_settings("routing.forms=mean+moments")).routing.forms


@pytest.mark.parametrize("forms", ["random", "mean+mean", "mean+", "+", "mean logistic", " mean"])
def test_a_form_that_there_is_not_cannot_be_sent(forms):
    said = refused(lambda: RoutingSettings(forms=forms), "forms is ")
    assert "must be different ones of mean, logistic, moments" in said
    refused(lambda: changed(Config(), {"routing.forms": forms}), "settings: routing.forms is ")


def test_a_form_that_does_not_go_with_the_context_cannot_be_sent():
    changes = {"router.context": "prefix", "router.form": "logistic", "routing.forms": "mean"}
    assert changed(Config(), changes).routing.forms == "mean"
    with pytest.raises(ValueError, match="'moments' needs the whole sequence"):
        changed(Config(), changes | {"routing.forms": "mean+moments"})


# ---- types and ranges, of every field

FIELDS = annotations(Config)
# what allows all of a field's range
BESIDE = {ProxySettings: dict(candidates=10**9, number=1)}
BESIDE |= {GateSettings: dict(least_open=-1000, most_open=1000)}
TYPED_FOR = {
    name: [t for t in TYPED if t not in ("", "{}") or not (hint is str or is_dataclass(hint))]
    for name, (_, _, hint) in FIELDS.items()
}


def refused(call, name):
    "The one error of a call, which has to begin with a name and be short."
    with pytest.raises(ValueError) as caught:
        call()
    said = str(caught.value)
    assert type(caught.value) is ValueError and "\n" not in said and len(said) < 400, said
    assert said.startswith(name), said
    return said


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_in_python_is_one_error_with_the_fields_name(field):
    owner, name, hint = FIELDS[field]
    values = odd_values(hint) | (MEANT if is_numeric(hint) else {})
    assert len(values) >= 12
    for what, value in values.items():
        said = refused(lambda: owner(**{name: value}), f"{name} is ")
        assert f", but must be {rules_of(owner)[name]}." in said, what
        refused(lambda: replace(owner(), **{name: value}), f"{name} is ")


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_by_name_is_one_error_with_the_dotted_name(field):
    owner, _, hint = FIELDS[field]
    for what, value in odd_values(hint).items():
        if is_dataclass(hint) and isinstance(value, dict):
            continue  # a stage, of which some or no fields are changed
        if hint is bool and what.startswith("numpy"):  # 1, which means True here
            stage, _, name = field.partition(".")
            beside = {"router.form": "evidence"} if name == "densities" else {}
            assert getattr(getattr(changed(Config(), {field: value} | beside), stage), name) is True
            continue
        for change in ({field: value}, nested(field, value)):
            said = refused(lambda: changed(Config(), change), "settings: ")
            assert re.match(rf"settings: '?{re.escape(field)}(\.a)?'? is ", said), what


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_that_is_typed_is_one_error_with_the_dotted_name(field, tmp_path):
    for text in TYPED_FOR[field]:
        said = refused(lambda: changed(Config(), read_settings(f"{field}={text}")), "settings: ")
        assert f"{field} is" in said, text


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_in_a_file_is_one_error_with_the_dotted_name(field, tmp_path):
    file, hint = tmp_path / "mine.yaml", FIELDS[field][2]
    for text in (".nan", ".inf", "[1, 2]", "2001-01-01", "!!binary AAAA", "many words", "1e400x"):
        file.write_text(f"{field}: {text}\n")
        said = refused(lambda: changed(Config(), read_settings(str(file))), "settings: ")
        assert f"{field} is" in said, (text, hint)


def test_there_are_more_odd_values_than_were_ever_tried():
    assert sum(len(odd_values(hint)) for *_, hint in FIELDS.values()) > 700


def test_every_number_has_a_range_whose_ends_may_be_taken():
    for field, (owner, name, hint) in FIELDS.items():
        rule = rules_of(owner)[name]
        assert (rule.range is not None) == is_numeric(hint), field
        if rule.range is None:
            continue
        assert rule.range.lowest < rule.range.highest < float("inf")
        for value in {rule.range.lowest, rule.range.highest} - {rule.range.without}:
            made = owner(**BESIDE.get(owner, {}) | {name: value})
            assert getattr(made, name) == value and value in rule


def test_the_kinds_of_numbers_are_kept_apart():
    made = ExpertSettings(alpha=1, clip=2)
    assert (type(made.alpha), type(made.clip), type(made.rank)) == (float, float, int)
    assert made == ExpertSettings(alpha=1.0, clip=2.0)
    for wrong in (True, 1.0, np.int32(1), np.float32(1), torch.tensor(1), "1"):
        refused(lambda: ExpertSettings(rank=wrong), "rank is ")
    for wrong in (1, 1.0, "true", None, np.bool_(True)):
        refused(lambda: ExpertSettings(proxies=wrong), "proxies is ")


def test_a_value_is_shown_shortly_and_with_its_type():
    said = refused(lambda: RouterSettings(top_k=np.array([[1], [2]])), "top_k is ")
    assert "of type ndarray" in said
    assert "(401 characters)" in refused(lambda: RouterSettings(top_k=10**400), "top_k is ")
    for wrong in (10**6000, brackets(100_000)):
        assert "top_k is too much to be shown" in refused(lambda: RouterSettings(wrong), "top_k is")


@pytest.mark.parametrize("wrong", [5, None, "expert.rank=2", [("expert.rank", 2)]], ids=str)
def test_changes_that_are_no_names_with_values_are_refused(wrong):
    refused(lambda: changed(Config(), wrong), "settings: changes are ")


@pytest.mark.parametrize("content", ["a: " * 30, "[" * 5000, "x: 1\n\ty: [", "n: " + "9" * 5000])
def test_a_file_that_cannot_be_read_is_one_error(content, tmp_path):
    (tmp_path / "odd.yaml").write_text(content)
    refused(lambda: read_settings(str(tmp_path / "odd.yaml")), f"settings: {tmp_path}/odd.yaml is ")
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe\xfd")
    refused(lambda: read_settings(str(tmp_path / "odd.yaml")), f"settings: {tmp_path}/odd.yaml is ")


def test_a_file_that_holds_itself_is_one_error(tmp_path):
    for content in ("expert: &a\n  rank: *a\n", "&a\nexpert: *a\n"):
        (tmp_path / "odd.yaml").write_text(content)
        refused(lambda: changed(Config(), read_settings(str(tmp_path / "odd.yaml"))), "settings: ")


# ---- presets


def test_defaults_are_the_papers():
    paper = Config()
    assert preset("paper") == paper
    assert paper.relevance == RelevanceSettings("probe", 10_000)
    assert paper.proxies == ProxySettings(3000, 500, "dpp", "dpp")
    training = asdict(Training(10, 128, 0.01, "sgd", 0.9, 1e-4, 0, 1, None, "no"))
    lora = dict(rank=16, alpha=32, dropout=0.0, proxies=True, private=True, untouched=0.0)
    assert asdict(paper.expert) == training | lora
    assert paper.finetune == FinetuneSettings(5, 128, 0.001, "sgd", 0.9, 1e-4, 0, 1, None, "no")
    assert paper.routing == RoutingSettings(10_000) and paper.random_state == 0
    router = RouterSettings(1, True, 0.3, True, False, False, "mean", "sequence")
    assert paper.router == router


def test_text_settings_are_those_of_the_papers_language_models():
    paper, text = preset("text-paper"), preset("text")
    adamw = dict(batch_size=32, learning_rate=1e-4, optimizer="adamw", weight_decay=0.0)
    assert paper.expert == ExpertSettings(epochs=10, warmup_steps=200, **adamw)
    assert paper.finetune == FinetuneSettings(epochs=1, **adamw)
    assert (paper.routing.public_samples, paper.router) == (2000, RouterSettings(lam=1.0))
    assert (paper.proxies, paper.relevance) == (Config().proxies, Config().relevance)
    assert text == replace(paper, router=text.router, routing=text.routing)


@pytest.mark.parametrize("name", ["text", "embedded-text"])
def test_models_of_text_keep_the_scale_and_route_what_is_being_written(name):
    config = preset(name)
    assert config.router.norm_topk_prob and config.router.top_k > 1 and config.router.seed_expert
    assert (config.router.form, config.router.context) == ("activation", "prefix")
    assert config.routing.sent(config.router) == ("activation",)  # means name members
    assert not config.gate.epochs


def test_released_settings_are_the_authors_codes_where_they_differ_and_ours_elsewhere():
    wanted = dict(top_k=1, seed_expert=False, norm_topk_prob=True, form="mean", lam=0.3)
    for name in PRESETS:
        ours, found = preset(name), preset(f"{name}-released")
        assert found.router == RouterSettings(context=ours.router.context, **wanted)
        proxies = replace(ours.proxies, candidates=ours.proxies.candidates * 2 // 3)
        assert found == replace(ours, router=found.router, proxies=proxies, gate=GateSettings())
    assert preset("paper-released").proxies.candidates == 2000


@pytest.mark.parametrize("name", ["", "Paper", "released", "-released", "paper-released-released"])
def test_a_preset_that_there_is_not_is_refused_naming_those_that_there_are(name):
    known = "one of paper, gated, text, embedded, ratios, many, text-"
    with pytest.raises(ValueError, match=known):
        preset(name)


# ---- changes


def test_names_with_points_and_nested_names_are_the_same():
    flat = changed(Config(), {"expert.rank": 2, "router.top_k": 3, "random_state": 5})
    nested = changed(Config(), {"expert": {"rank": 2}, "router": {"top_k": 3}, "random_state": 5})
    mixed = changed(Config(), {"expert": {"rank": 9}, "expert.rank": 2, "router.top_k": 3})
    assert flat == nested == replace(mixed, random_state=5)
    assert flat.expert == replace(Config().expert, rank=2)
    assert flat == replace(
        Config(), expert=flat.expert, router=RouterSettings(top_k=3), random_state=5
    )


def test_no_changes_change_nothing_and_the_given_settings_stay():
    for name in PRESETS:
        config = preset(name)
        before = asdict(config)
        assert changed(config, {}) == config == changed(config, {"router": {}})
        changed(config, {"expert.rank": 2})
        assert asdict(config) == before


def test_a_change_keeps_the_types_of_all_settings():
    def kinds(settings):
        values = {f.name: getattr(settings, f.name) for f in fields(settings)}
        return {k: kinds(v) if is_dataclass(v) else type(v) for k, v in values.items()}

    for name in PRESETS:
        assert kinds(changed(preset(name), {"random_state": 1})) == kinds(preset(name))
    assert type(changed(Config(), {}).expert) is ExpertSettings


def test_a_whole_number_for_a_float_is_the_same_setting():
    "Or what is kept under 8 would be made again for 8.0."
    whole = ExpertSettings(alpha=8, learning_rate=1, clip=2, dropout=0, weight_decay=0)
    for settings in (whole, changed(Config(expert=whole), {}).expert):
        for name in ("alpha", "learning_rate", "clip", "dropout", "weight_decay", "momentum"):
            assert type(getattr(settings, name)) is float, name
        assert type(settings.rank) is type(settings.epochs) is int
    for name in PRESETS:
        assert digest(asdict(preset(name))) == digest(asdict(changed(preset(name), {})))


@pytest.mark.parametrize("given, value", [("3", 3), (3.0, 3), (3, 3)], ids=repr)
def test_what_means_a_whole_number_is_one(given, value):
    found = changed(Config(), {"expert.epochs": given}).expert.epochs
    assert found == value and type(found) is int


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"router.topk": 1},
            "unknown field 'router.topk'. Did you mean 'top_k'? Known fields: top_k",
        ),
        ({"finetune.epoch": 1}, "unknown field 'finetune.epoch'. Did you mean 'epochs'?"),
        ({"expert.lr": 1}, "unknown field 'expert.lr'."),
        ({"experts.rank": 1}, "unknown field 'experts'. Did you mean 'expert'?"),
        ({"rank": 1}, "unknown field 'rank'."),
        ({"seed": 1}, "unknown field 'seed'."),
        ({"": 1}, "unknown field ''."),
        ({3: 1}, "unknown field '3'."),
        ({"router": 5}, "router is 5."),
        ({"expert": None}, "expert is None."),
        ({"expert": [1]}, "expert is [1]."),
        ({"random_state.x": 1}, "'random_state.x' is no field; 'random_state' holds one value."),
        ({"expert.rank.x": 1}, "'expert.rank.x' is no field; 'rank' holds one value."),
        (
            {"expert.epochs": 1.5},
            "expert.epochs is 1.5, but must be a whole number from 0 to 100,000.",
        ),
        ({"expert.epochs": "many"}, "expert.epochs is 'many', but"),
        ({"expert.epochs": [1]}, "expert.epochs is [1], but"),
        ({"router.top_k": None}, "router.top_k is None, but"),
        ({"expert.optimizer": 3}, "expert.optimizer is 3. Input should be 'sgd' or 'adamw'."),
        ({"expert.proxies": "maybe"}, "expert.proxies is 'maybe'."),
        ({"random_state": "x"}, "random_state is 'x', but"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_there_is_not_is_refused_saying_what_there_is(change, said):
    with pytest.raises(ValueError) as caught:
        changed(Config(), change)
    assert str(caught.value).startswith("settings: ") and said in str(caught.value)


def test_settings_come_back_from_a_manifest():
    for name in PRESETS:
        assert parse(Config, asdict(preset(name)), "it") == preset(name)


# ---- what is typed into a notebook's parameter, or a file


@pytest.mark.parametrize(
    "text, found",
    [
        ("", {}),
        ("  ", {}),
        (",,", {}),
        ("expert.rank=2", {"expert.rank": 2}),
        (" expert.rank = 2 , router.top_k=1, ", {"expert.rank": 2, "router.top_k": 1}),
        ("router.form=moments", {"router.form": "moments"}),
        ("router.seed_expert=false", {"router.seed_expert": False}),
        ("proxies.fill=null", {"proxies.fill": None}),
        ("expert.alpha=1.5", {"expert.alpha": 1.5}),
    ],
    ids=repr,
)
def test_a_list_of_settings_is_read(text, found):
    assert read_settings(text) == found
    changed(Config(), found)


def test_numbers_may_be_written_as_people_write_them():
    config = changed(Config(), read_settings("expert.learning_rate=1e-3,finetune.clip=.5"))
    assert (config.expert.learning_rate, config.finetune.clip) == (1e-3, 0.5)


@pytest.mark.parametrize("text", ["rank", "expert.rank 2", "expert.rank=2, top_k", "settings.json"])
def test_what_is_no_list_of_settings_is_refused(text):
    with pytest.raises(ValueError, match="is no 'stage.field=value'"):
        read_settings(text)


@pytest.mark.parametrize("text", ["expert.rank==3", "=3", "expert.rank=", "expert=3"])
def test_slips_in_a_list_are_refused_when_they_are_used(text):
    with pytest.raises(ValueError, match="^settings: "):
        changed(Config(), read_settings(text))


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml"])
def test_a_yaml_file_is_read(name, tmp_path):
    text = "expert:\n  rank: 2\n  optimizer: adamw\nrouter.top_k: 3\nrandom_state: 7\n"
    (tmp_path / name).write_text(text)
    config = changed(preset("embedded"), read_settings(str(tmp_path / name)))
    assert (config.expert.rank, config.expert.optimizer) == (2, "adamw")
    assert (config.router.top_k, config.random_state) == (3, 7)
    assert config.proxies == preset("embedded").proxies


def test_a_file_may_stand_among_others_and_the_last_for_a_field_counts(tmp_path):
    file, more = tmp_path / "mine.yaml", tmp_path / "more.yml"
    file.write_text("proxies:\n  number: 7\n  candidates: 70\nexpert: {rank: 2}\n")
    more.write_text("proxies: {candidates: 80}\n")
    text = f"proxies.number=5, expert.epochs=3, {file}, {more}, expert.rank=4"
    config = changed(Config(), read_settings(text))
    assert (config.proxies.number, config.proxies.candidates) == (7, 80)
    assert (config.expert.rank, config.expert.epochs) == (4, 3)
    assert changed(Config(), read_settings(f"{file}, proxies.number=5")).proxies.number == 5


def test_all_settings_can_be_written_to_a_file_and_read_again(tmp_path):
    file = tmp_path / "all.yaml"
    for name in PRESETS:
        file.write_text(yaml.safe_dump(asdict(preset(f"{name}-released"))))
        assert changed(Config(), read_settings(str(file))) == preset(f"{name}-released")


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_settings(str(tmp_path / "empty.yaml")) == {}


@pytest.mark.parametrize("content", ["- 1\n", "rank\n", "3\n"])
def test_a_file_that_holds_something_else_is_refused_naming_it(content, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match="valid dictionary") as caught:
        read_settings(str(file))
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        name = path if path.suffix else (tmp_path / "folder.yml")
        with pytest.raises(ValueError, match=f"there is no file {name}"):
            read_settings(str(name))


def test_a_file_cannot_run_code(tmp_path):
    file, made = tmp_path / "mine.yaml", tmp_path / "made"
    file.write_text(f"a: !!python/object/apply:os.mkdir ['{made}']\n")
    with pytest.raises((ValueError, yaml.YAMLError)):
        read_settings(str(file))
    assert not made.exists()


# ---- settings and data together


def test_settings_that_go_with_the_data_pass(tiny_settings, tiny_benchmark):
    check_settings(tiny_settings, tiny_benchmark)
    check_settings(changed(tiny_settings, {"router.top_k": 4}), tiny_benchmark)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"proxies.candidates": 91}, "candidates is 91, but the pool has 90 samples"),
        ({"proxies.number": 1}, "number is 1, but diversity needs at least 2"),
        ({"router.top_k": 5}, "top_k is 5, but must be 1 to 4, the number of experts"),
        ({"router.top_k": 4, "router.seed_expert": False}, "top_k is 4, but must be 1 to 3"),
    ],
    ids=str,
)
def test_settings_that_do_not_are_refused(change, said, tiny_settings, tiny_benchmark):
    with pytest.raises(ValueError, match=said):
        check_settings(changed(tiny_settings, change), tiny_benchmark)


def test_a_client_called_seed_is_refused(tiny_settings, tiny_benchmark):
    first, *others = tiny_benchmark.clients
    named = replace(tiny_benchmark, clients=[replace(first, name="seed"), *others])
    with pytest.raises(ValueError, match="a client is called 'seed'"):
        check_settings(tiny_settings, named)


def test_only_a_prefix_has_beginnings_and_for_a_closed_form_a_sample_counts_once():
    several = changed(preset("embedded-text"), {"routing.beginnings": 5})
    fading = dict(reach="prefix", number=5, horizon=several.router.horizon)
    assert several.looks("logistic") == several.looks("activation") == fading
    assert several.looks("mean") == dict(reach="prefix")
    assert changed(several, {"routing.beginnings": 1}).looks("logistic") == dict(reach="prefix")
    assert changed(several, {"router.context": "prompt"}).looks("logistic") == dict(reach="prompt")
    closed = {"routing.method": "lda", "router.form": "logistic"}
    assert changed(several, closed).looks("logistic") == dict(reach="prefix")
    assert guaranteed(several, 8.0).looks("logistic") == dict(reach="prefix")
