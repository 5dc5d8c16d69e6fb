"""The process: random states that are given back, exact float32 products, checked parameters, a
clock."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harmomoe.base import process
from harmomoe.base.process import StageClock, check_device, check_parameters, faster_cpu, seeded

# ---- randomness


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_seeded_blocks_repeat_and_leave_the_outer_generators_alone():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = [draws(), draws()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    outer = [draws()]
    with seeded(5):
        first = draws()
    with pytest.raises(KeyError), seeded(5):
        second = draws()
        raise KeyError
    outer.append(draws())
    with seeded(6):
        third = draws()
    assert first == second and outer == expected
    assert all(a != b for a, b in zip(first, third))


# ---- float32 on a CPU


def settings():
    return torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()


def test_products_are_as_exact_as_float32_whatever_the_processor():
    faster_cpu()
    a, b = torch.randn(2, 300, 768, generator=torch.Generator().manual_seed(1))
    assert (a @ b.T - (a.double() @ b.T.double())).abs().max() < 1e-3


def test_onednn_is_turned_on_only_where_it_wins(monkeypatch):
    before = settings()
    assert faster_cpu(onednn=False) is False and settings() == before
    for wins in (False, True):
        monkeypatch.setattr(process, "_onednn_wins", lambda: wins)
        assert faster_cpu() is wins
        assert settings() == (("medium", False) if wins else before)


@pytest.mark.parametrize(
    "says, capability, error, wins",
    [
        ("model name: AMD EPYC", "AVX512", 0, True),
        ("model name: AMD EPYC", "AVX512", 0.1, False),
        ("model name: AMD EPYC", "AVX2", 0, False),
        ("model name: Intel(R) Xeon(R)", "AVX512", 0, False),
        ("", "DEFAULT", 0, False),
    ],
)
def test_the_kind_of_processor_decides_and_not_how_busy_it_is(
    says, capability, error, wins, monkeypatch
):
    monkeypatch.setattr(process, "_processor", lambda: says)
    monkeypatch.setattr(process, "get_cpu_capability", lambda: capability)
    product = torch.Tensor.__matmul__

    def of(a, b):  # an error, as where "medium" means bfloat16
        exact = product(a.double(), b.double())
        return exact if a.dtype == torch.float64 else exact.float() + error

    monkeypatch.setattr(torch.Tensor, "__matmul__", of)
    monkeypatch.setattr(process.time, "perf_counter", lambda: pytest.fail("it was timed"))
    assert faster_cpu() is wins


def test_trying_onednn_leaves_the_precision_as_it_was():
    torch.set_float32_matmul_precision("high")
    assert process._onednn_wins() in (True, False)
    assert torch.get_float32_matmul_precision() == "high"


# ---- parameters

PARAMETERS = """name = "x"   # a comment
count = 3
rate: float = None
size: int = None
label: str = None
flag = True
lam = .3
"""


def cells(given=None):
    injected = [] if given is None else ["# Parameters\n" + given]
    return ["", PARAMETERS, *injected, "the cell that calls"]


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x", "CPU", "", "meta"])
def test_a_device_that_torch_does_not_have_is_one_error(device):
    with pytest.raises(ValueError, match=f"device is '{device}', but must be one .* such as 'cpu'"):
        check_device(device)


def test_a_device_that_torch_has_is_taken():
    check_device("cpu")


def test_defaults_alone_are_returned():
    assert check_parameters(cells()) == dict(
        name="x", count=3, rate=None, size=None, label=None, flag=True, lam=0.3
    )


def test_given_values_replace_defaults():
    given = 'name = "y"\ncount = 5\nrate = 1\nsize = 2\nlabel = "z"\nflag = False\nlam = 1\n'
    assert check_parameters(cells(given)) == dict(
        name="y", count=5, rate=1, size=2, label="z", flag=False, lam=1
    )
    assert check_parameters(cells("rate = None\nlabel = None\n"))["rate"] is None


def test_the_cell_may_be_run_twice_in_jupyter():
    again = "from harmomoe.base.process import check_parameters\nparameters = check_parameters(In)"
    assert check_parameters(["", PARAMETERS, again, again])["count"] == 3


@pytest.mark.parametrize(
    "given, said",
    [
        ("cuont = 3", "unknown parameter 'cuont'. Did you mean 'count'"),
        (
            "zzz = 3",
            "unknown parameter 'zzz'. Known parameters: name, count, rate, size, label, flag, lam",
        ),
        ('count = "3"', "'count' is '3', but must be of type int"),
        ("count = 3.5", "must be of type int"),
        ("count = True", "must be of type int"),
        ("count = None", "must be of type int"),
        ("flag = 1", "must be of type bool"),
        ('flag = "no"', "must be of type bool"),
        ("name = 3", "must be of type str"),
        ("label = 3", "must be of type str"),
        ('rate = "fast"', "must be of type float"),
        ("rate = True", "must be of type float"),
        ("size = 1.5", "must be of type int"),
        ("lam = [1]", "must be of type float"),
    ],
)
def test_unknown_and_mistyped_parameters_are_refused(given, said):
    with pytest.raises(ValueError) as caught:
        check_parameters(cells(given))
    assert said in str(caught.value)


def test_a_parameter_with_a_new_name_is_told_it():
    known = ["", "random_state = 0\nalpha = 16", "# Parameters\nseed = 3\n", "the cell that calls"]
    renamed = {"seed": "random_state", "rank": "lora_rank"}
    with pytest.raises(ValueError) as caught:
        check_parameters(known, renamed)
    assert str(caught.value) == (
        "parameter 'seed' is now called 'random_state' (the name seed means the model)."
    )
    with pytest.raises(ValueError, match="unknown parameter 'seed'"):
        check_parameters(known)
    known[2] = "# Parameters\nrank = 3\n"  # the new name is not one of this notebook
    with pytest.raises(ValueError, match="unknown parameter 'rank'. Known"):
        check_parameters(known, renamed)


def test_a_new_name_and_a_parameter_with_the_old_one_are_left_alone():
    renamed = {"seed": "random_state"}
    new = ["", "random_state = 0", "# Parameters\nrandom_state = 3\n", "the cell that calls"]
    assert check_parameters(new, renamed) == dict(random_state=3)
    both = ["", "seed = ''\nrandom_state = 0", "# Parameters\nseed = 'a'\n", "the cell that calls"]
    assert check_parameters(both, renamed) == dict(seed="a", random_state=0)


# ---- the clock


def test_clock_adds_up_what_has_one_name(monkeypatch):
    now = iter([0.0, 2.0, 3.0, 7.0])
    monkeypatch.setattr(process, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = StageClock()
    clock.done("training", 10)
    clock.done("packing")
    clock.done("training", 10)
    table = clock.table()
    assert table["seconds"].to_dict() == dict(training=6.0, packing=1.0)
    assert table["samples"].to_dict() == dict(training=20, packing=0)
    assert table.loc["training", "ms a sample"] == 300 and np.isnan(table["ms a sample"]["packing"])
    assert table["share, %"].sum() == pytest.approx(100)
