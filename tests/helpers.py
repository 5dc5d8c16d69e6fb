"What several test files use to look into folders of results."

import csv

from harmomoe.base.artefacts import MANIFEST


def kept(folder, kind):
    "The versions of one kind of artefact that lie side by side in a folder."
    return sorted(folder.glob(f"{kind}-*"))


def stamps(folder):
    """When each artefact below a folder was written; without bundles, which are written anew
    from the same files."""
    return {
        path.parent.relative_to(folder).as_posix(): path.stat().st_mtime_ns
        for path in folder.rglob(MANIFEST)
        if path.parent.name != "bundle"
    }


def table(folder):
    "The header of a run's table, and its rows by name."
    rows = list(csv.reader((folder / "table.csv").open()))
    return rows[0], {row[0]: [float(x) for x in row[1:]] for row in rows[1:]}


def tables(folder):
    "The bytes of the table, which are to be the same after the next run."
    return {suffix: (folder / f"table.{suffix}").read_bytes() for suffix in ("csv", "md")}
