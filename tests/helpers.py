"What several test files use to look into a client's folder."

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
