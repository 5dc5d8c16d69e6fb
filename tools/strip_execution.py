"""Take the times at which nbdev ran cells out of the processed notebooks:
`python tools/strip_execution.py`.

nbdev leaves them in the metadata of the cells that show an API entry. Quarto turns metadata that it
doesn't know into attributes of a block around the entry, and the entry's heading is then missing
from the page's contents list.
"""

import json

from make_readme import ROOT

for path in (ROOT / "_proc").rglob("*.ipynb"):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
