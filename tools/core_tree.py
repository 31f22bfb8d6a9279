"""Copy the tracked files to a folder, without plug-ins: ``python tools/core_tree.py FOLDER``.

``offbeat.plugins`` is there and cannot be imported, so that no installation of the package serves it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

PLUGINS = ("offbeat/plugins/", "tests/plugins/")
ABSENT = (
    """raise ModuleNotFoundError("No module named 'offbeat.plugins'", name="offbeat.plugins")\n"""
)


def main(folder: Path) -> None:
    """Replace the folder by a copy of the core."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        source = Path(name)
        if name and not name.startswith(PLUGINS) and source.is_file():
            (folder / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / source)
    (folder / "offbeat" / "plugins").mkdir()
    (folder / "offbeat" / "plugins" / "__init__.py").write_text(ABSENT, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
