"""Settings: the paper's and the authors', and no wrong one passes, whether it is a slip or bad
arithmetic."""

from dataclasses import asdict, fields, is_dataclass, replace

import pytest
import yaml

from harmomoe.base.artefacts import digest
from harmomoe.base.schema import parse
from harmomoe.config.settings import (
    Config,
    ExpertSettings,
    ProxySettings,
    RelevanceSettings,
    RoutingSettings,
    changed,
    check_settings,
    preset,
    read_settings,
)
from harmomoe.models.training import Training
from harmomoe.moe.router import RouterSettings

PRESETS = ("paper", "text", "embedded")

# ---- values


POSITIVE = (
    "relevance.negatives",
    "proxies.candidates",
    "proxies.number",
    "expert.rank",
    "expert.alpha",
    "expert.batch_size",
    "routing.public_samples",
    "finetune.learning_rate",
)
WRONG = [
    ({"relevance.method": "svm"}, "method is 'svm', but must be one of probe, finetune"),
    (
        {"proxies.selection": "best"},
        "selection is 'best', but must be one of dpp, similarity, rand",
    ),
    ({"proxies.fill": "most"}, "fill is 'most', but must be one of dpp, relevance, None"),
    ({"proxies.candidates": 10, "proxies.number": 11}, "m = 11.*cannot exceed candidates.*n = 10"),
    ({"expert.proxies": False, "expert.private": False}, "experts have nothing to train on"),
    ({"expert.optimizer": "adam"}, "optimizer 'adam' is neither 'sgd' nor 'adamw'"),
    ({"finetune.epochs": -1}, "epochs is -1, but must not be negative"),
    ({"finetune.learning_rate": float("nan")}, "learning_rate is nan, but must be positive"),
    ({"router.form": "zero"}, "form 'zero' is none of mean, logistic, moments, random"),
    ({"router.context": "page"}, "context 'page' is none of"),
    ({"router.lam": 1.5}, r"lam \(lambda\) is 1.5, but must be between 0 and 1"),
    ({"router.lam": -0.1}, "lam .* is -0.1"),
    ({"router.lam": float("nan")}, "lam .* is nan"),
    ({"router.top_k": 0}, "top_k is 0, but must be at least 1"),
    ({"router.top_k": -1}, "top_k is -1"),
    ({"router.form": "moments", "router.context": "prefix"}, "needs the whole sequence"),
]
WRONG += [({"expert.dropout": p}, f"dropout is {p}") for p in (-0.1, 1.0, 1.5, float("nan"))]
WRONG += [
    ({name: value}, f"{name.partition('.')[2]} is {value}.*, but must be positive")
    for name in POSITIVE
    for value in (0, -1)
]


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


# ---- presets


def test_defaults_are_the_papers():
    paper = Config()
    assert preset("paper") == paper
    assert paper.relevance == RelevanceSettings("probe", 10_000)
    assert paper.proxies == ProxySettings(3000, 500, "dpp", "dpp")
    training = asdict(Training(10, 128, 0.01, "sgd", 0.9, 1e-4, 0, 1, None, "no"))
    lora = dict(rank=16, alpha=32, dropout=0.0, proxies=True, private=True)
    assert asdict(paper.expert) == training | lora
    assert paper.finetune == Training(5, 128, 0.001, "sgd", 0.9, 1e-4, 0, 1, None, "no")
    assert paper.routing == RoutingSettings(10_000) and paper.random_state == 0
    router = RouterSettings(1, True, 0.3, True, False, False, "mean", "sequence")
    assert paper.router == router


def test_text_settings_are_those_of_the_papers_language_models():
    text = preset("text")
    adamw = dict(batch_size=32, learning_rate=1e-4, optimizer="adamw", weight_decay=0.0)
    assert text.expert == ExpertSettings(epochs=10, warmup_steps=200, **adamw)
    assert text.finetune == Training(epochs=1, **adamw)
    assert (text.routing.public_samples, text.router.lam) == (2000, 1.0)
    assert (text.proxies, text.relevance) == (Config().proxies, Config().relevance)


def test_released_settings_are_the_authors_codes_where_they_differ_and_ours_elsewhere():
    wanted = dict(top_k=1, seed_expert=False, norm_topk_prob=True, form="mean", lam=0.3)
    for name in PRESETS:
        ours, found = preset(name), preset(f"{name}-released")
        assert found.router == replace(ours.router, shared_lam=False, **wanted)
        proxies = replace(ours.proxies, candidates=ours.proxies.candidates * 2 // 3)
        assert found == replace(ours, router=found.router, proxies=proxies)
    assert preset("paper-released").proxies.candidates == 2000


@pytest.mark.parametrize("name", ["", "Paper", "released", "-released", "paper-released-released"])
def test_a_preset_that_there_is_not_is_refused_naming_those_that_there_are(name):
    with pytest.raises(ValueError, match="but must be one of paper, text, embedded"):
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
        ({"expert.epochs": 1.5}, "expert.epochs is 1.5. Input should be a valid integer"),
        ({"expert.epochs": "many"}, "expert.epochs is 'many'."),
        ({"expert.epochs": [1]}, "expert.epochs is [1]."),
        ({"router.top_k": None}, "router.top_k is None."),
        ({"expert.optimizer": 3}, "expert.optimizer is 3. Input should be a valid string."),
        ({"expert.proxies": "maybe"}, "expert.proxies is 'maybe'."),
        ({"random_state": "x"}, "random_state is 'x'."),
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
