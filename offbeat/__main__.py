"""``python -m offbeat`` is ``offbeat``."""

from offbeat.launch.commands.main import main

if __name__ == "__main__":
    main()
