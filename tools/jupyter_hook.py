"""Opening a notebook of the series changes nothing for git.

A front end writes the name and the version of its own kernel into every notebook that it opens. The server that `make lab`
starts calls `before_saving`, and so can another one that finds this folder:

    PYTHONPATH=tools jupyter lab --FileContentsManager.pre_save_hook=jupyter_hook.before_saving
"""

from __future__ import annotations

import re

from grpolab.lab.notebooks import tidy


def before_saving(*, model: dict, path: str = "", **_) -> None:
    """Jupyter's hook: tidy what is saved, if it is a notebook of the series with a kernel of Python's usual name."""
    name = path.split("/")[-1]
    if model.get("type") != "notebook" or not re.fullmatch(r"\d\d_\w+\.ipynb", name):
        return
    if model["content"]["metadata"].get("kernelspec", {}).get("name") == "python3":
        tidy(model["content"])
