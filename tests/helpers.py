"What several test files use to look into folders of results."

import csv
import os
import socket

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


def routing_of(bundle):
    "The routing vectors of a bundle that has one form of them."
    [found] = bundle.routing.values()
    return found


def table(folder):
    "The header of a run's table, and its rows by name."
    rows = list(csv.reader((folder / "table.csv").open()))
    return rows[0], {row[0]: [float(x) for x in row[1:]] for row in rows[1:]}


def tables(folder):
    "The bytes of the table, which are to be the same after the next run."
    return {suffix: (folder / f"table.{suffix}").read_bytes() for suffix in ("csv", "md")}


def tree(folder):
    "Every file below a folder, hidden ones too, with its content."
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def socket_at(path):
    "Make a socket; the name that it is bound to must be short."
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
