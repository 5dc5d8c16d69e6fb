"""Two processes train as one: the same losses and weights, whole frozen weights, checkpoints that
either takes up, and artefacts that one of them writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import two_processes as cases

from harmomoe.models import training as module
from harmomoe.models.training import Checkpoint

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo, which connects processes", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LAUNCH = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
HERE = Path(__file__).resolve().parent
BOTH = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@pytest.fixture(scope="module")
def two(tiny_folder, tiny_seed_folder, tmp_path_factory):
    "The folder in which two processes have done everything."
    folder = tmp_path_factory.mktemp("two")
    (folder / "data").symlink_to(tiny_folder)
    (folder / "seed").symlink_to(tiny_seed_folder)
    cases.FOLDER = folder
    cases.interrupted(folder / "by one", 5)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--use_fsdp"]
    command += ["--fsdp_version", "2", "--main_process_port", "0", *LAUNCH.split()]
    done = subprocess.run(
        [*command, HERE / "two_processes.py", folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def one(two):
    "What one process makes of a case."
    return lambda name, made={}: made.setdefault(name, cases.CASES[name]())


def close(found, expected, tolerance=1e-5):
    "Losses to 1e-5, and weights, which many small steps have moved, nearly so."
    assert found.keys() == expected.keys()
    assert found["losses"].tolist() == pytest.approx(expected["losses"].tolist(), rel=tolerance)
    for name in found.keys() - {"losses", "facts"}:
        assert found[name].dtype == expected[name].dtype
        assert torch.allclose(found[name], expected[name], atol=30 * tolerance), name


@BOTH
@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "dropout"])
def test_two_processes_learn_what_one_learns(kind, name, one, two):
    found = [cases.found(two, kind, name, rank) for rank in (0, 1)]
    half = name == "lora_half"  # sums of bfloat16 differ more
    close(found[0], one(name), 1e-3 if half else 1e-5)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    still, same, shards = found[0]["facts"].tolist()
    assert still == 0 and same == 1  # everything learned, and nothing frozen was changed
    assert (shards > 0) == (kind == "fsdp")


@BOTH
def test_dropout_is_each_process_s_own(kind, one, two):
    found, expected = cases.found(two, kind, "dropout"), one("dropout")
    assert found["losses"].tolist() == pytest.approx(expected["losses"].tolist(), rel=0.05)
    assert found["losses"].tolist() != expected["losses"].tolist()


def test_checkpoints_of_two_are_taken_up_by_one_and_the_other_way_round(one, two):
    close(cases.found(two, "ddp", "of one"), one("lora"))
    tensors, place = Checkpoint(two / "by two").read()
    assert place["epoch"] == 1 and "random" in tensors
    close(cases.resumed(two / "by two"), one("lora"))
    assert [path.name for path in (two / "by two").iterdir()] == ["training.safetensors"]


@pytest.mark.parametrize(
    "kind, cut, name", [("ddp", "resumed, dropout", "dropout"), ("fsdp", "resumed", "lora")]
)
def test_two_go_on_as_if_nothing_had_interrupted_them(kind, cut, name, two):
    found, expected = cases.found(two, kind, cut), cases.found(two, kind, name)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@BOTH
def test_a_client_and_a_server_of_two_processes(kind, two, tmp_path):
    folder = two / dict(ddp="house", fsdp="house-fsdp")[kind]
    expected = cases.house(tmp_path)
    for rank in (0, 1):
        close(cases.found(two, kind, "house", rank), expected)
    built = [json.loads((folder / f"built-{rank}.json").read_text()) for rank in (0, 1)]
    assert built[0] == json.loads((tmp_path / "built-0.json").read_text())
    assert {"expert", "model"} <= set(built[0])
    assert built[1] == [built[0][-1]]  # it wrote nothing, and took part in every step
    left = [path.name for path in folder.rglob(".*")]
    assert not left, left


def test_who_was_started_with_others_has_to_join_them(monkeypatch, two):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="has not joined them: call `join`"):
        cases.run("images", cases.adapted("images"))


def test_the_first_version_of_fsdp_is_refused(monkeypatch, two):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setattr(module, "world", lambda: module.World(0, 2))
    seed, data, classes = cases.given("images")
    with pytest.raises(ValueError, match="add --fsdp_version 2"):
        with module.sharded(seed, cases.adapted("images")):
            pass
