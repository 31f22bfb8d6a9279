"""Copy the tracked files to a folder, without plug-ins: ``python tools/core_tree.py FOLDER``.

Byte code that Python keeps there stays: a copy has the time of its file, by which Python knows the code.
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
    """Make the folder a copy of the core."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True)
    copied = {
        Path(name)
        for name in listed.stdout.split("\0")
        if name and not name.startswith(PLUGINS) and Path(name).is_file()
    }
    for kept in [*folder.rglob("*")]:
        if not kept.is_dir() and kept.suffix != ".pyc" and kept.relative_to(folder) not in copied:
            kept.unlink()
    for source in copied:
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, folder / source)
    (folder / "offbeat" / "plugins").mkdir(exist_ok=True)
    (folder / "offbeat" / "plugins" / "__init__.py").write_text(ABSENT, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
