"The page of adapters on the small model: a small run stores its table, and says where texts lack."

import json
from pathlib import Path

import pandas as pd
import pytest

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "adapters.ipynb"

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_a_small_run_stores_its_table_and_says_where_texts_lack(run_cells, tmp_path, capsys):
    rows = [dict(text=f"It is said of {i} that it is {i * i}, and of {i + 1}?") for i in range(40)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = dict(base="embedded-text", data=f"rust, few={tmp_path}/few.jsonl", tokens=2000)
    small |= dict(test=2, examples=12, parts=False, speed=False, threads=1)
    space = run_cells(PAGE, small | dict(out=str(tmp_path / "out")))
    assert "All that there is, and fewer than 2,000: few\n" in capsys.readouterr().out
    counted = {name: sum(map(space["count"], one)) for name, one in space["trained"].items()}
    assert counted["few"] < 2000 <= counted["rust"]
    assert len(space["trained"]["few"]) == len(space["domains"]["few"].train)
    table = pd.read_csv(tmp_path / "out" / "bits.csv", index_col=0)
    assert {"seed", "matching adapter", "adapter: few", "harmomoe"} <= {*table.index}
    assert list(table) == ["rust", "few", "average", "public"]
    assert table.loc["matching adapter", "few"] == table.loc["adapter: few", "few"]
    assert (table.drop(columns="public") > 0).all(axis=None)
