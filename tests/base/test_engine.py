"Engines give the same results, in the order of the tasks, and raise what a task raises."

import io
import os
import subprocess
import sys
import time

import pytest
import torch

from harmomoe.base.engine import Local, Processes, Ray, _connected, read_engine

ENGINES = Local(), Processes(2), Ray("local")
engines = pytest.mark.parametrize("engine", ENGINES, ids=["local", "processes", "ray"])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    "Two workers on this machine, if there is Ray."
    try:
        import ray
    except ImportError:
        yield
        return
    ray.shutdown()  # of other tests
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker could import it
    _connected("local", num_cpus=2, object_store_memory=1 << 27)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def there_is_ray(request):
    if "ray" in request.node.name:
        pytest.importorskip("ray")


def late(number, seconds):
    time.sleep(seconds)
    return number


def failing(text):
    raise ValueError(text)


def left_behind(folder, number):
    (folder / str(number)).touch()
    return number


def fragile(marker, times):
    "Kills its worker so many times."
    killed = len(list(marker.parent.glob("killed*")))
    if killed < times:
        (marker.parent / f"killed{killed}").touch()
        os.kill(os.getpid(), 9)
    return killed


def until(marker):
    "Wait for a file, a minute at most, and leave another if it came."
    for _ in range(600):
        if marker.exists():
            marker.with_name(f"{marker.name}-seen").touch()
            break
        time.sleep(0.1)


def at_home(thing):
    return id(thing), len(thing)


@engines
def test_results_come_in_the_order_of_the_tasks(engine):
    tasks = [(late, number, 0.2 * (number == 0)) for number in range(5)]
    assert engine.run(tasks, "late") == [*range(5)]
    assert engine.run([], "none") == []


@engines
def test_an_error_is_raised_as_it_is(engine):
    with pytest.raises(ValueError, match="^so it is$") as raised:
        engine.run([(failing, "so it is"), *[(late, 1, 0.01)] * 3], "failing")
    assert type(raised.value) is ValueError


def test_an_error_is_said_before_what_still_runs_has_ended(tmp_path, monkeypatch):
    class Heard(io.StringIO):
        def write(self, text):
            if "failing: so it is. Waiting for what still runs." in text:
                (tmp_path / "said").touch()
            return len(text)

    monkeypatch.setattr("sys.stderr", Heard())
    with pytest.raises(ValueError, match="^so it is[.]$"):
        Processes(2).run([(until, tmp_path / "said"), (failing, "so it is.")], "failing")
    assert (tmp_path / "said-seen").exists()


def surroundings(name):
    return os.getppid(), os.environ.get(name)


def test_workers_have_todays_environment_and_need_no_imports_again(monkeypatch):
    found = []
    for value in (None, "set", "changed"):
        if value:
            monkeypatch.setenv("HARMOMOE_TEST", value)
        found += Processes(2).run([(surroundings, "HARMOMOE_TEST")], "surroundings")
    assert [value for _, value in found] == [None, "set", "changed"]
    if sys.platform == "linux" and not torch.cuda.is_available():  # all are forks of one process
        [server] = {parent for parent, _ in found}
        assert server != os.getpid()


WAITING = """
import time
from concurrent.futures import ProcessPoolExecutor as Pool
from multiprocessing import get_context
from harmomoe.base.engine import Processes, end_with_parent

def wait(number):
    print("here", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    {}
"""
POOL = """with Pool(2, get_context("spawn"), end_with_parent) as pool:
        list(pool.map(wait, (0, 1)))"""


@pytest.mark.parametrize("work", ['Processes(2).run([(wait, 0), (wait, 1)], "waiting")', POOL])
def test_workers_end_with_a_process_that_is_killed(work, tmp_path):
    "They hold its standard output, which is at its end when they have."
    (tmp_path / "waiting.py").write_text(WAITING.format(work))
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen([sys.executable, tmp_path / "waiting.py"], **how) as process:
        assert [process.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        process.kill()
        assert process.communicate(timeout=60) == (b"", None)


@engines
def test_what_was_finished_stays(engine, tmp_path):
    tasks = [(left_behind, tmp_path, number) for number in range(3)]
    assert engine.run(tasks, "files") == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_ray_runs_a_task_again_whose_worker_is_killed(tmp_path):
    tasks = [(late, 1, 0), (fragile, tmp_path / "marker", 2)]
    assert Ray("local").run(tasks, "fragile") == [1, 2]


def test_ray_gives_up_in_the_end(tmp_path):
    with pytest.raises(RuntimeError, match="a task was lost"):
        Ray("local").run([(fragile, tmp_path / "marker", 9)], "fragile")
    assert len(list(tmp_path.iterdir())) == 4  # once, and three times more


def test_ray_sends_what_tasks_share_once(monkeypatch):
    import ray

    sent, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda thing: sent.append(thing) or put(thing))
    shared, own = [1] * 1000, [[2], [3]]
    found = Ray("local").run([(at_home, shared), *[(at_home, x) for x in own]], "none shared")
    assert sent == [] and [size for _, size in found] == [1000, 1, 1]
    Ray("local").run([(at_home, shared), (at_home, shared)], "shared")
    assert sent == [shared]


def test_a_cluster_that_is_not_there(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(address, **how):
        raise ConnectionError(f"Could not find any running Ray instance at {address}.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConnectionError, match="there is no Ray cluster at 10.0.0.1:6379"):
        Ray("10.0.0.1:6379").run([(late, 1, 0)], "nobody")


@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_start_is_tried_twice(slow, monkeypatch):
    ray, tried = pytest.importorskip("ray"), []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(address, **how):
        tried.append(address)
        if len(tried) <= slow:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    if slow == 1:
        assert _connected("local") is ray
    else:
        with pytest.raises(ConnectionError, match="at local: The current node timed out"):
            _connected("local")
    assert tried == ["local", "local"]


@pytest.mark.parametrize(
    "word, engine",
    [
        ("local", Local()),
        ("processes:1", Local()),
        ("processes:2", Processes(2)),
        ("processes:1024", Processes(1024)),
        ("ray", Ray()),
        ("ray:local", Ray("local")),
        ("ray:10.0.0.1:6379", Ray("10.0.0.1:6379")),
    ],
)
def test_a_word_names_an_engine(word, engine):
    assert read_engine(word) == engine


@pytest.mark.parametrize(
    "word",
    ["", "cluster", "Local", "local:2", "processes", "processes:", "processes:0", "processes:-1"]
    + ["processes:two", "processes:1.5", "process:2", "processes:1025", "threads:2", "2", "ray:"],
)
def test_another_word_is_refused(word):
    with pytest.raises(ValueError, match="but must be 'local', 'processes:N'"):
        read_engine(word)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("harmomoe.base.engine.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"harmomoe\[ray\]"):
        read_engine("ray")
