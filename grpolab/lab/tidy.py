"""A notebook of the series as git keeps it, whatever front end saves it.

A front end writes the name and the version of its own kernel into every notebook that it opens, and saves that. The server
that `make lab` starts calls `before_saving`, so that opening a notebook of the series changes nothing for git:

    jupyter lab --FileContentsManager.pre_save_hook=grpolab.lab.tidy.before_saving
"""

from __future__ import annotations

import json
import re


def tidy(notebook: dict) -> dict:
    """The notebook with the plain kernel's name and no version of Python; changed in place."""
    notebook["metadata"]["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"]["language_info"] = {"name": "python"}
    return notebook


def written(notebook: dict) -> str:
    """The text of a notebook as Jupyter writes it: sorted keys, one space a level, an end of line at its end."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def before_saving(*, model: dict, path: str = "", **_) -> None:
    """Jupyter's hook: tidy what is saved, if it is a notebook of the series with a kernel of Python's usual name."""
    name = path.split("/")[-1]
    if model.get("type") != "notebook" or not re.fullmatch(r"\d\d_\w+\.ipynb", name):
        return
    if model["content"]["metadata"].get("kernelspec", {}).get("name") == "python3":
        tidy(model["content"])
